"""Python targets: the extension, the importable tree, the wheel, tests, programs.

No Python toolchain: each runs the interpreter in @host_python, with the packages
in @python_packages.
"""

load("@host_python//:defs.bzl", "ABI_TAG", "EXTENSION_SUFFIX", "MACHINE", "PACKAGE_VERSION", "PYTHON", "PYTHON_TAG")
load("@rules_cc//cc:cc_binary.bzl", "cc_binary")
load("//build_defs:cc.bzl", "PAGEMILL_COPTS")

# What auditwheel calls the wheel; //tests/wheel compares.
_PLATFORM_TAG = "manylinux_2_34_" + MACHINE

def nanobind_extension(name, srcs, deps = [], **kwargs):
    """A nanobind module; its file gets the interpreter's (or abi3) suffix.

    Args:
      name: the module's name.
      srcs: C++ sources and private headers.
      deps: libraries; nanobind is added.
      **kwargs: passed on to cc_binary.
    """
    cc_binary(
        name = name + EXTENSION_SUFFIX,
        srcs = srcs,
        additional_linker_inputs = ["//build_defs:extension.lds"],
        copts = PAGEMILL_COPTS,
        linkopts = [
            "-pthread",
            "-Wl,--gc-sections",
            "-Wl,-s",
            # Else the file would carry its place in Bazel's output.
            "-Wl,-soname," + name + EXTENSION_SUFFIX,
            "-Wl,--version-script=$(location //build_defs:extension.lds)",
        ],
        linkshared = True,
        tags = ["python"],
        deps = deps + ["@nanobind"],
        **kwargs
    )
    native.filegroup(
        name = name,
        srcs = [name + EXTENSION_SUFFIX],
        tags = ["python"],
        visibility = kwargs.get("visibility"),
    )

PyTreeInfo = provider(
    "An importable package.",
    fields = {
        "files": "list of (path in the tree, File)",
        "folder": "runfiles path of the tree",
    },
)

def _place(file, roots):
    for prefix, target in roots.items():
        if file.short_path.startswith(prefix):
            return target + file.short_path[len(prefix):]
    fail("%s is under none of %s" % (file.short_path, roots.keys()))

def _py_tree_impl(ctx):
    files = [(_place(file, ctx.attr.roots), file) for file in ctx.files.srcs]
    files += [(ctx.attr.package + "/" + file.basename, file) for file in ctx.files.extensions]
    links = []
    for path, file in files:
        link = ctx.actions.declare_file(ctx.label.name + ".tree/" + path)
        ctx.actions.symlink(output = link, target_file = file)
        links.append(link)
    folder = "/".join([part for part in [ctx.label.package, ctx.label.name + ".tree"] if part])
    return [
        DefaultInfo(files = depset(links), runfiles = ctx.runfiles(links)),
        PyTreeInfo(files = files, folder = folder),
    ]

py_tree = rule(
    implementation = _py_tree_impl,
    doc = "Sources and extensions, laid out as one importable folder.",
    attrs = {
        "extensions": attr.label_list(allow_files = True),
        "package": attr.string(mandatory = True),
        "roots": attr.string_dict(
            mandatory = True,
            doc = "workspace prefix of sources to their prefix in the tree",
        ),
        "srcs": attr.label_list(allow_files = True),
    },
)

def _py_wheel_impl(ctx):
    tag = "-".join([PYTHON_TAG, ABI_TAG, _PLATFORM_TAG])
    wheel = ctx.actions.declare_file("%s-%s-%s.whl" % (ctx.attr.distribution, PACKAGE_VERSION, tag))
    files = ctx.attr.tree[PyTreeInfo].files
    manifest = ctx.actions.declare_file(ctx.label.name + ".manifest.json")
    ctx.actions.write(manifest, json.encode({
        "name": ctx.attr.distribution,
        "version": PACKAGE_VERSION,
        "tag": tag,
        "metadata": ctx.attr.metadata,
        "description": ctx.file.description.path,
        "license": ctx.file.license.path,
        "files": [[path, file.path] for path, file in files],
    }))
    ctx.actions.run(
        executable = PYTHON,
        arguments = ["-I", ctx.file._tool.path, manifest.path, wheel.path],
        inputs = [manifest, ctx.file._tool, ctx.file.description, ctx.file.license] + [file for _, file in files],
        outputs = [wheel],
        mnemonic = "PyWheel",
        progress_message = "Assembling %{output}",
    )
    return [DefaultInfo(files = depset([wheel]), runfiles = ctx.runfiles([wheel]))]

py_wheel = rule(
    implementation = _py_wheel_impl,
    attrs = {
        "description": attr.label(allow_single_file = True, mandatory = True),
        "distribution": attr.string(mandatory = True),
        "license": attr.label(allow_single_file = True, mandatory = True),
        "metadata": attr.string_list(doc = "lines of METADATA"),
        "tree": attr.label(providers = [PyTreeInfo], mandatory = True),
        "_tool": attr.label(default = "//build_defs:make_wheel.py", allow_single_file = True),
    },
)

# `runfiles` is where Bazel laid the target's files out, for a test, for
# `bazel run`, or when the file is started by hand.
_LAUNCHER = """#!/bin/bash
runfiles="${{RUNFILES_DIR:-${{TEST_SRCDIR:-$0.runfiles}}}}/{workspace}"
export PYTHONPATH="$runfiles/{tree}:{root}{sites}"
export PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
# The packages hold a libtpu; without a TPU JAX must not look for one.
if {always_cpu} || ! compgen -G "/dev/accel*" && ! compgen -G "/dev/vfio/[0-9]*"; then
    export JAX_PLATFORMS="${{JAX_PLATFORMS:-cpu}}" TPU_SKIP_MDS_QUERY=1
fi >/dev/null
# Several processes may compile for TPUs at once.
export ALLOW_MULTIPLE_LIBTPU_LOAD=1
# And write no logs to /tmp: where it fails they can fill the disk.
export TPU_LOG_DIR="${{TPU_LOG_DIR:-disabled}}"
{change_folder}
exec "{python}" {arguments} "$@"
"""

def _path_in(site):
    """A shell word that names a site's folder of importable modules."""
    for file in site[DefaultInfo].files.to_list():
        if file.basename == "place.txt":
            return '$(<"$runfiles/%s")' % file.short_path
    fail("%s holds no place.txt" % site.label)

def _launcher(ctx, arguments, change_folder, is_test, with_root):
    sites = [ctx.attr._packages] + ctx.attr.sites

    # Not the bare name: it may be that of a folder in the runfiles.
    launcher = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(launcher, _LAUNCHER.format(
        workspace = ctx.workspace_name,
        tree = ctx.attr.tree[PyTreeInfo].folder,
        root = "$runfiles:" if with_root else "",
        sites = ":".join([_path_in(site) for site in sites]),
        always_cpu = "true" if is_test else "false",
        change_folder = change_folder,
        python = PYTHON,
        arguments = arguments,
    ), is_executable = True)
    files = ctx.files.srcs + ctx.files.data + ctx.files._packages + ctx.files.sites
    runfiles = ctx.runfiles(files).merge(ctx.attr.tree[DefaultInfo].default_runfiles)
    for data in ctx.attr.data:
        runfiles = runfiles.merge(data[DefaultInfo].default_runfiles)
    return launcher, runfiles

def _pytest_test_impl(ctx):
    arguments = " ".join([
        "-m pytest -q -p no:cacheprovider -c pyproject.toml --rootdir=.",
        '--junitxml="$XML_OUTPUT_FILE"',
    ] + [file.short_path for file in ctx.files.srcs])
    launcher, runfiles = _launcher(
        ctx,
        arguments,
        'cd "$runfiles" || exit 1',
        is_test = True,
        with_root = True,
    )
    return [
        DefaultInfo(executable = launcher, runfiles = runfiles),
        testing.TestEnvironment(ctx.attr.env),
    ]

_ATTRS = {
    "data": attr.label_list(allow_files = True),
    "env": attr.string_dict(),
    "sites": attr.label_list(doc = "more packages: @repository//:site"),
    "srcs": attr.label_list(allow_files = [".py"]),
    "tree": attr.label(default = "//:pagemill", providers = [PyTreeInfo]),
    "_packages": attr.label(default = "@python_packages//:site"),
}

_pytest_test = rule(implementation = _pytest_test_impl, attrs = _ATTRS, test = True)

def pytest_test(name, srcs, data = [], tags = [], **kwargs):
    """A test file run by pytest; the workspace's root is importable.

    Args:
      name: the target's name.
      srcs: test files.
      data: what they read or import beside the package.
      tags: tags added to "python".
      **kwargs: size, env and the like.
    """
    _pytest_test(
        name = name,
        srcs = srcs,
        data = data + ["//:pyproject.toml"],
        tags = ["python"] + tags,
        **kwargs
    )

def _python_program_impl(ctx):
    arguments = "-m " + ctx.attr.module if ctx.attr.module else ""
    change_folder = 'cd "${BUILD_WORKING_DIRECTORY:-.}" || exit 1'
    launcher, runfiles = _launcher(
        ctx,
        arguments,
        change_folder,
        is_test = False,
        with_root = bool(ctx.attr.module),
    )
    return [DefaultInfo(executable = launcher, runfiles = runfiles)]

_python_program = rule(
    implementation = _python_program_impl,
    attrs = _ATTRS | {"module": attr.string()},
    executable = True,
)

def python_program(name, tags = [], **kwargs):
    """The interpreter with the package importable, in the caller's folder.

    Args:
      name: the target's name.
      tags: tags added to "python".
      **kwargs: srcs and data; module, which to run, or none for the bare
        interpreter.
    """
    _python_program(name = name, tags = ["python"] + tags, **kwargs)
