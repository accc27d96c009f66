"""Google Benchmark, as Debian packages it: a shared library and headers."""

load("//third_party:debian.bzl", "unpack_deb")

_LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"
_PACKAGES = {
    "libbenchmark-dev": "82c9048e75f3d83b3b8a349144d5ca55487eb370b34167ffe12f8060300ed462",
    "libbenchmark1debian": "59f0902a880853ef0fc658ecee85da35dd2ab03485a7cf305cad233e8b607621",
}

def _benchmark_impl(rctx):
    if rctx.os.arch != "amd64":
        fail("\nGoogle Benchmark is pinned for amd64 only, and this machine is %s. " % rctx.os.arch +
             "Only the C++ benchmarks use it.")
    for package, sha256 in _PACKAGES.items():
        unpack_deb(rctx, "pool/main/b/benchmark/%s_1.7.1-1_amd64.deb" % package, sha256)
    rctx.execute(["mv", "root/usr/include", "include"])

    # Under the name that programs linked with it ask for.
    rctx.execute(["cp", "-L", "root/%s/libbenchmark.so.1.7.1" % _LIBRARY_FOLDER, "libbenchmark.so.1debian"])
    rctx.delete("root")
    rctx.file("main.cc", "#include <benchmark/benchmark.h>\n\nBENCHMARK_MAIN();\n")
    rctx.symlink(Label("//third_party/benchmark:benchmark.BUILD.bazel"), "BUILD.bazel")

benchmark_repository = repository_rule(implementation = _benchmark_impl)
