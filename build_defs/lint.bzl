"""The linters as one program over the source tree."""

load("@buildifier//:defs.bzl", "BUILDIFIER")
load("@host_python//:defs.bzl", "PYTHON")
load("@lint_packages//:defs.bzl", "SITE")

def _lint_impl(ctx):
    program = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.expand_template(
        template = ctx.file._script,
        output = program,
        substitutions = {
            "@BUILDIFIER@": BUILDIFIER,
            "@PYTHON@": PYTHON,
            "@SITE@": SITE,
        },
        is_executable = True,
    )
    return [DefaultInfo(executable = program)]

lint = rule(
    implementation = _lint_impl,
    attrs = {"_script": attr.label(default = "//tools:lint.sh", allow_single_file = True)},
    executable = True,
)
