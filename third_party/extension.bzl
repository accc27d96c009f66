"""Everything the build takes from outside, as one module extension.

Each repository is fetched only when something needs it: the C++ tests install
no Python packages, and the wheel needs no GoogleTest.
"""

load("//third_party/benchmark:repository.bzl", "benchmark_repository")
load("//third_party/buildifier:repository.bzl", "buildifier_repository")
load("//third_party/googletest:repository.bzl", "googletest_repository")
load("//third_party/nanobind:repository.bzl", "nanobind_repository")
load("//third_party/peers:repository.bzl", "peers_repositories")
load("//third_party/python:host.bzl", "host_python_repository")
load("//third_party/python:packages.bzl", "packages_repository")
load("//third_party/xla_ffi:repository.bzl", "xla_ffi_repository")

def _third_party_impl(_mctx):
    host_python_repository(name = "host_python")
    packages_repository(name = "python_packages", lock = "packages")
    packages_repository(name = "lint_packages", lock = "lint")
    packages_repository(name = "benchmark_packages", lock = "benchmarks")
    nanobind_repository(name = "nanobind")
    xla_ffi_repository(name = "xla_ffi")
    googletest_repository(name = "googletest")
    benchmark_repository(name = "benchmark")
    buildifier_repository(name = "buildifier")
    peers_repositories()

third_party = module_extension(implementation = _third_party_impl)
