"""The linters as one program over the source tree."""

load("@host_python//:defs.bzl", "PYTHON")
load("//build_defs:python.bzl", "PyTreeInfo")

def _lint_impl(ctx):
    root = ctx.workspace_name + "/"
    program = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.expand_template(
        template = ctx.file._script,
        output = program,
        substitutions = {
            "@BUILDIFIER@": root + ctx.file._buildifier.short_path,
            "@PYTHON@": PYTHON,
            "@SITE@": root + ctx.file._site.short_path,
            "@TREE@": root + ctx.attr.tree[PyTreeInfo].folder,
        },
        is_executable = True,
    )
    return [DefaultInfo(
        executable = program,
        runfiles = ctx.runfiles([
            ctx.file._buildifier,
            ctx.file._site,
        ]).merge(ctx.attr.tree[DefaultInfo].default_runfiles),
    )]

lint = rule(
    implementation = _lint_impl,
    attrs = {
        "tree": attr.label(providers = [PyTreeInfo], mandatory = True),
        "_buildifier": attr.label(default = "@buildifier//:place.txt", allow_single_file = True),
        "_script": attr.label(default = "//tools:lint.sh", allow_single_file = True),
        "_site": attr.label(default = "@lint_packages//:place.txt", allow_single_file = True),
    },
    executable = True,
)
