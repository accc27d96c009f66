"""Checks that arrows point one way: who may include or import what.

Two tables say it all; the rest reads the sources. Run from the workspace root.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

# Folder: what its C++ files may include beside the standard library.
INCLUDES = {
    # The compiler's own headers for a CPU's instructions count as standard.
    "csrc/core": ("csrc/core/", "cpuid.h", "immintrin.h", "sys/mman.h"),
    "csrc/ffi": ("csrc/core/", "csrc/ffi/", "xla/ffi/"),
    "csrc/bindings": ("csrc/", "nanobind/"),
}
TEST_INCLUDES = ("gtest/", "gmock/", "benchmark/")

# Folder: the modules its Python files may import beside the standard library.
# The longest folder that holds a file counts.
_CORE = ("jax", "numpy")
IMPORTS = {
    "python/pagemill": (*_CORE, "absl", "pagemill"),
    "kernels": (
        *_CORE,
        "pagemill.spec",
        "pagemill.kv_cache",
        "pagemill.params",
        "pagemill.batch",
        "pagemill.errors",
        "pagemill.dispatch",
        "pagemill.kernels",
    ),
    "python/pagemill/testing": _CORE,
    # The compiler is driven through jaxlib; of ours only what is light.
    "python/pagemill/inspect": (
        *_CORE,
        "jaxlib",
        "pagemill.errors",
        "pagemill.inspect",
    ),
    "demo": (*_CORE, "rich", "pagemill", "demo"),
    "benchmarks": (*_CORE, "numba", "pagemill", "benchmarks", "demo"),
}
# Folders of programs over the package.
PROGRAMS = ("demo", "benchmarks")
# Modules of the package that only programs outside of it import.
LEAVES = ("pagemill.compat", "pagemill.cli", "pagemill.testing")

_INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', re.MULTILINE)


def cpp_faults(path: pathlib.Path, text: str) -> Iterator[str]:
    """Includes of a C++ file that its layer does not allow."""
    folder = _longest(path, INCLUDES)
    allowed = INCLUDES[folder]
    if path.stem.endswith(("_test", "_benchmark")):
        allowed += TEST_INCLUDES
    for name in _INCLUDE.findall(text):
        standard = "/" not in name and not name.endswith(".h")
        if not standard and not name.startswith(allowed):
            yield f"{path}: includes {name}; {folder} may not"


def python_faults(path: pathlib.Path, text: str) -> Iterator[str]:
    """Imports of a Python file that its layer does not allow."""
    folder = _longest(path, IMPORTS)
    allowed = (*IMPORTS[folder], *sys.stdlib_module_names)
    inside_leaf = any(
        f"python/{leaf.replace('.', '/')}" in path.as_posix() for leaf in LEAVES
    )
    for name in _imported(ast.parse(text)):
        if not _within(name, allowed):
            yield f"{path}: imports {name}; {folder} may not"
        if folder not in PROGRAMS and not inside_leaf and _within(name, LEAVES):
            yield f"{path}: imports {name}, which the package may not"


def _imported(tree: ast.AST) -> Iterator[str]:
    """Modules named; `from a import b` as a.b where that may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")  # In no table.
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "pagemill" or node.module.startswith(
                ("pagemill.kernels", "pagemill.inspect")
            ):
                yield from (f"{node.module}.{a.name}" for a in node.names)
            else:
                yield node.module


def _within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == m or name.startswith(m + ".") for m in modules)


def _longest(path: pathlib.Path, table: dict[str, tuple[str, ...]]) -> str:
    return max((f for f in table if path.is_relative_to(f)), key=len)


def main() -> int:
    """Prints every fault; exit code 1 if there is one."""
    faults: list[str] = []
    for folder in INCLUDES:
        for pattern in ("*.h", "*.cc", "*.def"):
            for path in sorted(pathlib.Path(folder).rglob(pattern)):
                faults += cpp_faults(path, path.read_text("utf-8"))
    for folder in IMPORTS:
        for path in sorted(pathlib.Path(folder).rglob("*.py")):
            faults += python_faults(path, path.read_text("utf-8"))
    faults = sorted(set(faults))
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
