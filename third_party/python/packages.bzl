"""Python packages, from a hashed lock for the chosen interpreter.

They are installed once per lock into a repository. Actions read them at their
absolute place and have only the lock's copy as an input: Bazel would need long
to lay out some ten thousand files for every test.
"""

load("//third_party/python:host.bzl", "host_python")

def pip(rctx, python, arguments, what, environment = {}):
    """Runs pip, or fails with what it said.

    Args:
      rctx: the repository context.
      python: what host_python returned.
      arguments: of pip.
      what: what is being done, for the progress line and the error.
      environment: variables set beside the inherited ones.
    """
    rctx.report_progress(what)
    result = rctx.execute(
        [python["executable"], "-I", "-m", "pip", "--disable-pip-version-check", "-q"] + arguments,
        environment = environment,
        timeout = 1800,
    )
    if result.return_code != 0:
        fail("\n%s: pip failed. It needs the network, or a mirror in pip's configuration:\n%s" % (what, result.stderr))

# Of a repository whose place.txt names a folder of importable modules.
SITE_BUILD = """\
exports_files([
    "lock.txt",
    "place.txt",
])

filegroup(
    name = "site",
    srcs = [
        "lock.txt",
        "place.txt",
    ],
    visibility = ["//visibility:public"],
)
"""

def _packages_impl(rctx):
    python = host_python(rctx)
    version = "%d.%d" % tuple(python["version"])
    lock = rctx.read(Label("//third_party/python:%s_%s.lock" % (rctx.attr.lock, version)))
    rctx.file("lock.txt", lock)
    pip(rctx, python, [
        "install",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--no-compile",
        "--target=site",
        "--requirement=lock.txt",
    ], "Installing %s for Python %s" % (rctx.attr.lock, version))

    # In the repository, so that tests and programs find modules compiled.
    rctx.execute([python["executable"], "-I", "-m", "compileall", "-q", "-j0", "site"], timeout = 600)

    # A file, not a constant in a .bzl: loading a BUILD file installs nothing.
    rctx.file("place.txt", str(rctx.path("site")) + "\n")
    rctx.file("BUILD.bazel", SITE_BUILD)

packages_repository = repository_rule(
    implementation = _packages_impl,
    attrs = {"lock": attr.string(mandatory = True)},
)
