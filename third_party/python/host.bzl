"""The Python interpreter that everything is built for and run with."""

_NEWEST = (3, 13)
_OLDEST = (3, 11)

_PROBE = """
import json, sys, sysconfig
print(json.dumps({
    "executable": sys.executable,
    "version": sys.version_info[:2],
    "include": sysconfig.get_paths()["include"],
    "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    "machine": sysconfig.get_platform().split("-")[-1],
}))
"""

def host_python(rctx):
    """Facts about the interpreter in @host_python, for other repositories.

    They come from its file, so that a repository is made anew when the
    interpreter is another one, and not when it is only named differently.

    Args:
      rctx: the repository context.

    Returns:
      A dict with what _PROBE prints.
    """
    return json.decode(rctx.read(Label("@host_python//:facts.json")))

def _find_python(rctx):
    """Facts about PAGEMILL_PYTHON, or the newest supported interpreter found."""
    chosen = rctx.getenv("PAGEMILL_PYTHON")
    if chosen:
        facts, why = _probe(rctx, chosen)
        if not facts:
            fail("\nPAGEMILL_PYTHON=%s cannot be used: %s" % (chosen, why))
        return facts
    for minor in range(_NEWEST[1], _OLDEST[1] - 1, -1):
        for candidate in _candidates(rctx, "%d.%d" % (_NEWEST[0], minor)):
            facts, _ = _probe(rctx, candidate)
            if facts and facts["version"][1] == minor:
                return facts
    fail("\nno Python from %d.%d to %d.%d was found, on PATH or among pyenv's. " % (_OLDEST + _NEWEST) +
         "Install one, or set PAGEMILL_PYTHON to its path.")

def _candidates(rctx, version):
    names = ["python" + version, "python3"]
    found = [str(path) for path in [rctx.which(name) for name in names] if path]
    for root in [rctx.getenv("PYENV_ROOT"), (rctx.getenv("HOME") or "") + "/.pyenv"]:
        versions = rctx.path(root + "/versions") if root else None
        if versions and versions.exists:
            found += [
                "%s/bin/python" % path
                for path in versions.readdir()
                if path.basename.startswith(version + ".")
            ]
    return found

def _probe(rctx, executable):
    # -I: no PYTHONPATH, no current directory.
    result = rctx.execute([executable, "-I", "-c", _PROBE])
    if result.return_code != 0:
        return None, result.stderr or "it does not run"
    facts = json.decode(result.stdout)
    version = tuple(facts["version"])
    if version < _OLDEST or version > _NEWEST:
        return None, "it is Python %d.%d; supported are %d.%d to %d.%d" % (version + _OLDEST + _NEWEST)
    if not rctx.path(facts["include"] + "/Python.h").exists:
        return None, "it lacks its headers (%s/Python.h)" % facts["include"]
    result = rctx.execute([executable, "-I", "-m", "pip", "--version"])
    if result.return_code != 0:
        return None, "it has no pip"
    return facts, None

def copy_tree(rctx, python, source, target):
    """Copies a folder.

    Not a link: sandboxed actions may see another /tmp, where environments often
    live.

    Args:
      rctx: the repository context.
      python: what host_python returned.
      source: the folder.
      target: its new place in the repository.
    """
    code = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])"
    result = rctx.execute([python["executable"], "-I", "-c", code, source, target])
    if result.return_code != 0:
        fail("\ncould not copy %s: %s" % (source, result.stderr))

_BUILD = """\
load("@rules_cc//cc:cc_library.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    defines = {defines},
    includes = ["include"],
)
"""

_DEFS = '''\
"""The chosen interpreter, and the package's version."""

PYTHON = "{executable}"
PYTHON_VERSION = "{version}"
PYTHON_TAG = "{tag}"
ABI_TAG = "{abi}"
EXTENSION_SUFFIX = "{suffix}"
MACHINE = "{machine}"
PACKAGE_VERSION = "{package}"
'''

def _host_python_impl(rctx):
    python = _find_python(rctx)
    rctx.file("facts.json", json.encode(python))
    major, minor = python["version"]
    abi3 = minor >= 12 and not python["free_threaded"]
    own_tag = "cp%d%d" % (major, minor)
    copy_tree(rctx, python, python["include"], "include")
    rctx.file("BUILD.bazel", _BUILD.format(
        defines = ["Py_LIMITED_API=0x030C0000"] if abi3 else [],
    ))
    rctx.file("defs.bzl", _DEFS.format(
        executable = python["executable"],
        version = "%d.%d" % (major, minor),
        tag = "cp312" if abi3 else own_tag,
        abi = "abi3" if abi3 else own_tag + ("t" if python["free_threaded"] else ""),
        suffix = ".abi3.so" if abi3 else python["suffix"],
        machine = python["machine"],
        package = _package_version(rctx),
    ))

def _package_version(rctx):
    for line in rctx.read(Label("//python/pagemill:_version.py")).splitlines():
        if line.startswith("__version__ = "):
            return line.split('"')[1]
    fail("python/pagemill/_version.py states no __version__")

host_python_repository = repository_rule(
    implementation = _host_python_impl,
    local = True,
)
