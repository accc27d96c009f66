"""nanobind's sources, from its wheel."""

load("//third_party/python:host.bzl", "host_python")
load("//third_party/python:packages.bzl", "pip")

_WHEEL = "nanobind==3.1.0 --hash=sha256:96984dbe8154ffb86e653b1b60aaeed6985c710c5e75ad0279eb87943c66292d\n"

def _nanobind_impl(rctx):
    rctx.file("requirements.txt", _WHEEL)
    pip(rctx, host_python(rctx), [
        "install",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--no-compile",
        "--target=site",
        "--requirement=requirements.txt",
    ], "Fetching nanobind")
    rctx.symlink(Label("//third_party/nanobind:nanobind.BUILD.bazel"), "BUILD.bazel")

nanobind_repository = repository_rule(implementation = _nanobind_impl)
