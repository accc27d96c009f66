"""Lets a peer's module be imported without what it imports.

The modules measured are plain Python; torch and the rest of their packages are
imported for annotations and for paths that a benchmark does not take. What the
finder fabricates in their place is gone from sys.modules afterwards, so that
nobody else takes it for the real thing.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any


class _StubType(type):
    """Lets the stub class be subscripted, and have any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub

    def __getitem__(cls, item: object) -> Any:
        return cls


class Stub(metaclass=_StubType):
    """Stands for whatever a stub module is asked for: it does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of some packages that nothing else finds."""

    def __init__(self, packages: Sequence[str], real: Sequence[str]) -> None:
        self._packages = packages
        self._real = real
        self.made: list[str] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 (the base class's)
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package not in self._packages or fullname in self._real:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(
        self, spec: importlib.machinery.ModuleSpec
    ) -> types.ModuleType:
        self.made.append(spec.name)
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = lambda name: getattr(Stub, name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A stub runs nothing."""


@contextlib.contextmanager
def stubbed(packages: Sequence[str], real: Sequence[str]) -> Iterator[None]:
    """While it is entered, what cannot be imported of packages is stubbed.

    Args:
        packages: top-level packages.
        real: modules of theirs that have to be there; they are never stubbed.
    """
    finder = _Finder(packages, real)
    # Last: what is there is imported as it is.
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)
