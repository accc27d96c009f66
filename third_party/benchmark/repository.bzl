"""Google Benchmark, the static library that Debian packages."""

load("//third_party:debian.bzl", "unpack_deb")

# machine -> (Debian's name, library folder, hash)
_PACKAGES = {
    "amd64": (
        "amd64",
        "x86_64-linux-gnu",
        "82c9048e75f3d83b3b8a349144d5ca55487eb370b34167ffe12f8060300ed462",
    ),
}

def _benchmark_impl(rctx):
    if rctx.os.arch not in _PACKAGES:
        fail("\nGoogle Benchmark is pinned for %s only, and this machine is %s. " % (
            ", ".join(_PACKAGES.keys()),
            rctx.os.arch,
        ) + "Only the C++ benchmarks use it.")
    arch, folder, sha256 = _PACKAGES[rctx.os.arch]
    unpack_deb(
        rctx,
        "pool/main/b/benchmark/libbenchmark-dev_1.7.1-1_%s.deb" % arch,
        sha256,
    )
    rctx.execute(["mv", "root/usr/include", "include"])
    rctx.execute(["mv", "root/usr/lib/" + folder, "lib"])
    rctx.delete("root")
    rctx.symlink(Label("//third_party/benchmark:benchmark.BUILD.bazel"), "BUILD.bazel")

benchmark_repository = repository_rule(implementation = _benchmark_impl)
