"""What Pagemill raises.

Every message says name=value, the rule it breaks, where, and what to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pagemill import _core

_MAX_SHOWN = 8
_WITH_VIOLATIONS = 2  # arguments of a PagemillError


@dataclasses.dataclass(frozen=True)
class Problem:
    """One broken rule of a call's arguments, found without their values.

    Attributes:
      argument: the argument at fault.
      message: one sentence with names and values.
      remedy: what to do about it.
    """

    argument: str
    message: str
    remedy: str


class PagemillError(ValueError):
    """Wrong input.

    Attributes:
      violations: every fault found, in order; each has at least ``message``
        and ``remedy``. Those of a batch's values also have ``code``,
        ``sequence``, ``index``, ``value`` and ``limit``.
    """

    # ``args`` holds it all, as no Python need run for that: the message, or
    # None where the violations make it; and the violations, if there are any.
    __slots__ = ()

    @property
    def violations(self) -> tuple[Problem | _core.Violation, ...]:
        """Every fault found, in order; made into a tuple when first read."""
        if len(self.args) < _WITH_VIOLATIONS:
            return ()
        message, found = self.args
        if not isinstance(found, tuple):
            self.args = (message, tuple(found))
        return cast("tuple[Problem | _core.Violation, ...]", self.args[1])

    def __str__(self) -> str:
        """The message; made when it is first read."""
        message, *found = self.args or ("",)
        if message is None:
            from pagemill import _core  # noqa: PLC0415

            message = _core.format_violations(*found)
            self.args = (message, *found)
        return str(message)

    def __repr__(self) -> str:
        """As of any exception, with the message."""
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.violations)


class SpecError(PagemillError):
    """Shapes, dtypes or options of a call do not fit the op's spec."""

    def __init__(self, op: str, problems: Sequence[Problem]) -> None:
        super().__init__(_format(op, problems), problems)
        self.op = op

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.op, list(self.violations))


class CapacityError(RuntimeError):
    """The page pool cannot serve a request that is otherwise right.

    Nothing was changed; close or preempt sequences and plan again.

    Attributes:
      need: pages that the request needs.
      free: pages that were free.
      evictable: pages that were cached and held by nobody: they count as
        available.
      fenced: pages held only by steps in flight: they come back when those
        are retired, so that preempting may not be needed.
      rank: whose pool it is, from a :class:`pagemill.ShardedPlanner`.
    """

    def __init__(
        self,
        message: str,
        *,
        need: int = 0,
        free: int = 0,
        evictable: int = 0,
        fenced: int = 0,
        rank: int | None = None,
    ) -> None:
        super().__init__(message)
        self.need = need
        self.free = free
        self.evictable = evictable
        self.fenced = fenced
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return _capacity_error, (
            str(self),
            self.need,
            self.free,
            self.evictable,
            self.fenced,
            self.rank,
        )


class LeaseError(RuntimeError):
    """Every buffer of a planner is leased, or another thread is using it.

    Nothing was changed; commit or abort steps and retire them.
    """


class UnsupportedError(NotImplementedError):
    """The chosen implementation cannot run here, or not with these options."""


def _capacity_error(
    message: str,
    need: int,
    free: int,
    evictable: int,
    fenced: int,
    rank: int | None,
) -> CapacityError:
    return CapacityError(
        message,
        need=need,
        free=free,
        evictable=evictable,
        fenced=fenced,
        rank=rank,
    )


def _format(op: str, problems: Sequence[Problem]) -> str:
    first, *others = problems
    lines = [f"{first.message} {first.remedy}"]
    lines += [f"  also: {p.message} {p.remedy}" for p in others[:_MAX_SHOWN]]
    if len(others) > _MAX_SHOWN:
        lines.append(f"  and {len(others) - _MAX_SHOWN} more.")
    lines.append(f"  (arguments of {op})")
    return "\n".join(lines)
