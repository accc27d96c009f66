"""Debian packages, pinned by version and hash, unpacked without root.

apt's own helper fetches them, so that its mirror, proxy and certificates apply
and no package lists are needed; Debian keeps a stable release's versions.
"""

_HELPER = "/usr/lib/apt/apt-helper"

def unpack_deb(rctx, pool_path, sha256):
    """Downloads one .deb from this machine's Debian mirror and unpacks it.

    Args:
      rctx: the repository context.
      pool_path: where the file is on a mirror, from "pool/" on.
      sha256: the hash that the file must have.
    """
    if not rctx.which("apt-get") or not rctx.which("dpkg-deb"):
        fail("\n%s: this needs apt-get and dpkg-deb, which this machine lacks.\n" % pool_path +
             "Only the C++ tests and benchmarks use it; //:wheel builds without it.")

    mirror = _mirror(rctx)
    deb = pool_path.split("/")[-1]
    rctx.report_progress("Downloading %s" % deb)
    result = rctx.execute([
        _HELPER,
        "-o",
        "APT::Sandbox::User=root",
        "download-file",
        mirror + pool_path,
        deb,
        "SHA256:" + sha256,
    ], timeout = 600)
    if result.return_code != 0:
        fail("\ncould not download %s from %s:\n%s" % (pool_path, mirror, result.stderr))

    result = rctx.execute(["dpkg-deb", "-x", deb, "root"])
    if result.return_code != 0:
        fail("\ncould not unpack %s:\n%s" % (deb, result.stderr))
    rctx.delete(deb)

def _mirror(rctx):
    """The Debian mirror that apt's sources name, ending in a slash."""
    result = rctx.execute([
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI)",
        "Created-By: Packages",
    ])
    for line in result.stdout.splitlines():
        if line.rstrip("/").endswith("/debian"):
            return line.rstrip("/") + "/"
    fail("\napt's sources name no Debian mirror, which GoogleTest and Google " +
         "Benchmark come from. Only the C++ tests and benchmarks use them; " +
         "//:wheel builds without them.")
