"""XLA's FFI headers, from the oldest supported jaxlib.

New headers on an old runtime fail at registration; old ones on a new runtime
pass. The wheel is fetched for a fixed Python, whichever is chosen: the headers
are the same.
"""

load("//third_party/python:host.bzl", "host_python")
load("//third_party/python:packages.bzl", "pip")

_WHEEL = "jaxlib==0.10.0 --hash=sha256:9be229993a41e5b2b84f234ecc19a5de02f35eddb1195cf027bd539e1601e15d\n"
_PREFIX = "jaxlib/include/"
_EXTRACT = """
import glob, sys, zipfile
(wheel,) = glob.glob("wheel/*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(".", [n for n in archive.namelist() if n.startswith(sys.argv[1])])
"""

def _xla_ffi_impl(rctx):
    python = host_python(rctx)
    rctx.file("requirements.txt", _WHEEL)
    pip(rctx, python, [
        "download",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--platform=manylinux_2_27_x86_64",
        "--python-version=3.11",
        "--implementation=cp",
        "--abi=cp311",
        "--dest=wheel",
        "--requirement=requirements.txt",
    ], "Fetching XLA's FFI headers")
    result = rctx.execute([python["executable"], "-I", "-c", _EXTRACT, _PREFIX])
    if result.return_code != 0:
        fail("\ncould not unpack the headers: " + result.stderr)
    rctx.delete("wheel")
    rctx.symlink(Label("//third_party/xla_ffi:xla_ffi.BUILD.bazel"), "BUILD.bazel")

xla_ffi_repository = repository_rule(implementation = _xla_ffi_impl)
