"""What can keep a kernel from being inspected; each is a type of its own."""

from __future__ import annotations

from pagemill.errors import PagemillError


class InspectError(PagemillError):
    """No figures could be had; the message says why."""


class LibtpuMissingError(InspectError):
    """The compiler is not installed."""


class UnknownTpuError(InspectError):
    """No generation of that name."""


class CompileError(InspectError):
    """The program does not trace, lower or compile for this TPU."""


class OutOfVmemError(CompileError):
    """The kernel needs more VMEM than it is granted.

    Attributes:
      needed: bytes; None when the compiler does not say.
      limit: bytes granted; None when the compiler does not say.
    """

    needed: int | None = None
    limit: int | None = None


class CompileTimeoutError(CompileError):
    """The compiler was stopped after the given time."""
