"""buildifier, from the npm package that carries its binaries."""

_PACKAGE = "@bazel/buildifier@8.2.1"
_SHA256 = "b96ea9b13003036c801f52bee6f9b0314738f8432e5cb9d814c89f59292604ee"

def _buildifier_impl(rctx):
    # Where it is; empty without npm.
    rctx.file("place.txt", _fetch(rctx) + "\n")
    rctx.file("BUILD.bazel", 'exports_files(["place.txt"])\n')

def _fetch(rctx):
    npm = rctx.which("npm")
    if not npm:
        return ""
    rctx.report_progress("Fetching buildifier")
    result = rctx.execute([npm, "pack", "--silent", _PACKAGE], timeout = 600)
    if result.return_code != 0:
        fail("\nnpm could not fetch %s:\n%s" % (_PACKAGE, result.stderr))
    archive = result.stdout.strip().splitlines()[-1]
    found = rctx.execute(["sha256sum", archive]).stdout.split(" ")[0]
    if found != _SHA256:
        fail("\n%s has sha256 %s, not %s" % (archive, found, _SHA256))
    rctx.extract(archive)
    rctx.execute(["chmod", "+x", "package/buildifier-linux_amd64"])
    return str(rctx.path("package/buildifier-linux_amd64"))

buildifier_repository = repository_rule(implementation = _buildifier_impl)
