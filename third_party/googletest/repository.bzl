"""GoogleTest, from the sources that Debian packages.

Sources rather than its static library: sanitizers have to see all of a test.
"""

load("//third_party:debian.bzl", "unpack_deb")

def _googletest_impl(rctx):
    unpack_deb(
        rctx,
        "pool/main/g/googletest/googletest_1.12.1-0.2_all.deb",
        "927be72067517da503b6538026d451455c9e860f5dbfe237f792543db7d5a928",
    )
    for part in ["googletest", "googlemock"]:
        rctx.execute(["mv", "root/usr/src/googletest/" + part, part])
    rctx.delete("root")
    rctx.symlink(Label("//third_party/googletest:googletest.BUILD.bazel"), "BUILD.bazel")

googletest_repository = repository_rule(implementation = _googletest_impl)
