"""C++ targets of this project: rules_cc's with the project's own options."""

load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_cc//cc:cc_test.bzl", "cc_test")

# One section per function and hidden symbols, so that the extension drops what
# it does not use and shows only its entry point.
PAGEMILL_COPTS = [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-fdata-sections",
]

def pagemill_cc_library(name, copts = [], **kwargs):
    """A C++ library.

    Args:
      name: the target's name.
      copts: compiler options added to the project's own.
      **kwargs: passed on to cc_library.
    """
    cc_library(
        name = name,
        copts = PAGEMILL_COPTS + copts,
        linkstatic = True,
        **kwargs
    )

def pagemill_cc_test(name, copts = [], deps = [], linkopts = [], size = "small", **kwargs):
    """A GoogleTest program; GoogleTest and a main are added.

    Args:
      name: the target's name.
      copts: compiler options added to the project's own.
      deps: libraries under test.
      linkopts: linker options added to the project's own.
      size: Bazel's test size.
      **kwargs: passed on to cc_test.
    """
    cc_test(
        name = name,
        copts = PAGEMILL_COPTS + copts,
        linkopts = ["-pthread"] + linkopts,
        linkstatic = True,
        size = size,
        deps = deps + ["@googletest//:gtest_main"],
        **kwargs
    )

def pagemill_cc_benchmark(name, copts = [], deps = [], linkopts = [], tags = [], **kwargs):
    """A Google Benchmark program; the library and a main are added.

    Tagged manual: `//...` builds no benchmark, `bazel run` on it does.

    Args:
      name: the target's name.
      copts: compiler options added to the project's own.
      deps: libraries to measure.
      linkopts: linker options added to the project's own.
      tags: tags added to "manual" and "benchmark".
      **kwargs: passed on to cc_binary.
    """
    cc_binary(
        name = name,
        copts = PAGEMILL_COPTS + copts,
        linkopts = ["-pthread"] + linkopts,
        linkstatic = True,
        tags = ["benchmark", "manual"] + tags,
        deps = deps + ["@benchmark//:benchmark_main"],
        **kwargs
    )
