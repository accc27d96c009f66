"""Static checks of an op, declared as data and read by one interpreter.

An :class:`OpSpec` lists operands with the letters of their shapes, relations
between letters, attributes with their ranges, and limits of single platforms.
:func:`check` binds the letters, collects *all* problems and raises one
:class:`pagemill.errors.SpecError`. Nothing else in the package looks at
shapes, dtypes or option ranges again.

Rules are expressions over letters (``"Hq % Hkv == 0"``), so that tables and
tests can be made from them. Messages are ``str.format`` templates; they may
name letters, their long names (``LETTERS``), operands (``{q.shape}``) and, in
attributes, ``{value}``.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from pagemill.errors import Problem, SpecError

LETTERS = {
    "T": "max_num_tokens",
    "S": "max_num_seqs",
    "P": "pages_per_seq",
    "N": "total_num_pages",
    "page": "page_size",
    "C": "num_combined_kv_heads",
    "Hq": "num_q_heads",
    "Hkv": "num_kv_heads",
    "D": "head_dim",
    "Dv": "v_head_dim",
    "Dk": "kv_head_dim",
    "W": "tree_mask_words",
}

FLOATS = ("float32", "bfloat16")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
INT32 = ("int32",)


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array argument.

    Attributes:
      name: the argument's name.
      dims: one letter or expression per dimension. A letter not bound before
        is bound to the size found; anything else must equal it.
      dtypes: names of the dtypes accepted.
      optional: None is accepted.
      shape_message, shape_remedy: template for a wrong size.
      dtype_message, dtype_remedy: template for a wrong dtype.
    """

    name: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    shape_message: str = ""
    shape_remedy: str = ""
    dtype_message: str = ""
    dtype_remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Relation:
    """A rule between letters; skipped while one of them is unbound."""

    rule: str
    argument: str
    message: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Attribute:
    """An option that is static under jit.

    Attributes:
      name: the option's name.
      kind: ``"float"``, ``"int"`` or ``"bool"``.
      default: what None stands for, an expression over letters; empty where
        None is itself the value (the option is off).
      required: None is a problem.
      rules: (expression over ``value``, message template, remedy), tried in
        order until one fails.
    """

    name: str
    kind: str
    default: str = ""
    required: bool = False
    rules: tuple[tuple[str, str, str], ...] = ()


# What one platform cannot do: a function of a sound call's letters, operands
# and options that yields the problems.
Limits = Callable[[Mapping[str, Any]], Iterable[Problem]]


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """Everything about an op that can be checked without array values."""

    name: str
    operands: tuple[Operand, ...]
    derived: tuple[tuple[str, str], ...] = ()
    relations: tuple[Relation, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    limits: Mapping[str, Limits] = dataclasses.field(default_factory=dict)


class _Scope(dict[str, Any]):
    """Letters under their short and long names."""

    def bind(self, letter: str, value: Any) -> None:
        self[letter] = value
        if letter in LETTERS:
            self[LETTERS[letter]] = value


class _UnboundError(Exception):
    """An expression names a letter that a faulty operand left unbound."""


def evaluate(expression: str, scope: Mapping[str, Any]) -> Any:
    """The value of a spec's expression; it can see letters and min/max."""
    try:
        # The expressions are constants of the package, never user input.
        return eval(  # noqa: S307
            expression,
            {
                "__builtins__": {},
                "min": min,
                "max": max,
                "isfinite": math.isfinite,
            },
            scope,
        )
    except NameError as error:
        raise _UnboundError(str(error)) from None


def check(
    spec: OpSpec,
    operands: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
    platform: str | None = None,
) -> dict[str, Any]:
    """Checks a call against a spec.

    Args:
      spec: what to check against.
      operands: arrays (or anything with ``shape`` and ``dtype``) by name.
      attributes: options by name; absent ones count as None.
      platform: also hold the limits of this platform.

    Returns:
      The options as plain Python values, defaults filled in.

    Raises:
      SpecError: names every problem.
    """
    problems: list[Problem] = []
    scope = _Scope()
    scope.update({n: a for n, a in operands.items() if a is not None})
    for operand in spec.operands:
        _check_operand(operand, operands.get(operand.name), scope, problems)
    for letter, expression in spec.derived:
        try:
            scope.bind(letter, evaluate(expression, scope))
        except _UnboundError:
            continue
    values = _check_attributes(spec, attributes or {}, scope, problems)
    scope.update(values)
    _check_relations(spec.relations, scope, problems)
    limits = None if platform is None else spec.limits.get(platform)
    if limits is not None and not problems:
        problems += limits(scope)
    if problems:
        raise SpecError(spec.name, list(dict.fromkeys(problems)))
    return values


def _check_operand(
    operand: Operand, array: Any, scope: _Scope, problems: list[Problem]
) -> None:
    name = operand.name

    def report(message: str, remedy: str) -> None:
        problems.append(Problem(name, message, remedy))

    if array is None:
        if not operand.optional:
            report(f"{name} is missing.", f"Pass an array of {_dims(operand)}.")
        return
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        report(
            f"{name} is a {type(array).__name__}, not an array.",
            f"Pass a numpy or jax array of {_dims(operand)}.",
        )
        return
    if str(np.dtype(array.dtype)) not in operand.dtypes:
        names = " or ".join(operand.dtypes)
        message = operand.dtype_message or (
            f"The dtype of `{name}` must be {names}. Got {array.dtype}."
        )
        report(
            _fill(message, scope),
            operand.dtype_remedy
            or f"Cast it: {name}.astype({operand.dtypes[0]!r}).",
        )
    expected = _expected(operand, array, scope)
    if expected == tuple(array.shape):
        return
    message = operand.shape_message or (
        f"Expected {name}.shape={tuple(array.shape)} to be {{expected}}, "
        f"which is {_dims(operand)}."
    )
    report(
        _fill(message, {**scope, "expected": _tuple(expected)}),
        operand.shape_remedy or "Make the shapes of all arguments agree.",
    )


def _expected(
    operand: Operand, array: Any, scope: _Scope
) -> tuple[int | str, ...]:
    """The shape that the letters ask for; binds those not bound before.

    A dimension whose letters are unknown, since an operand is faulty, is
    expected as it is found, or by its name where the rank is wrong.
    """
    same_rank = len(array.shape) == len(operand.dims)
    expected: list[int | str] = []
    for axis, dim in enumerate(operand.dims):
        if same_rank and dim.isidentifier() and dim not in scope:
            scope.bind(dim, array.shape[axis])
        try:
            expected.append(evaluate(dim, scope))
        except _UnboundError:
            unknown = LETTERS.get(dim, dim)
            expected.append(array.shape[axis] if same_rank else unknown)
    return tuple(expected)


def _tuple(shape: tuple[int | str, ...]) -> str:
    comma = "," if len(shape) == 1 else ""
    return f"({', '.join(map(str, shape))}{comma})"


def _dims(operand: Operand) -> str:
    names = [LETTERS.get(d, d) for d in operand.dims]
    return "[" + ", ".join(names) + "]"


def _fill(template: str, scope: Mapping[str, Any]) -> str:
    try:
        return template.format(**scope)
    except (KeyError, AttributeError, IndexError):
        # A faulty operand left a letter unbound: show what can be shown.
        return template


def _check_relations(
    relations: tuple[Relation, ...], scope: _Scope, problems: list[Problem]
) -> None:
    for relation in relations:
        try:
            holds = evaluate(relation.rule, scope)
        except (_UnboundError, AttributeError, TypeError, ZeroDivisionError):
            continue
        if not holds:
            problems.append(
                Problem(
                    relation.argument,
                    _fill(relation.message, scope),
                    _fill(relation.remedy, scope),
                )
            )


def _check_attributes(
    spec: OpSpec,
    given: Mapping[str, Any],
    scope: _Scope,
    problems: list[Problem],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for attribute in spec.attributes:
        value = given.get(attribute.name)
        if value is None and attribute.default:
            try:
                value = evaluate(attribute.default, scope)
            except (_UnboundError, TypeError, ZeroDivisionError):
                continue
        if value is not None or attribute.required:
            value = _check_attribute(attribute, value, scope, problems)
        values[attribute.name] = value
    return values


def _check_attribute(
    attribute: Attribute, value: Any, scope: _Scope, problems: list[Problem]
) -> Any:
    name = attribute.name
    try:
        value = _CASTS[attribute.kind](value)
    except _CastError as error:
        problems.append(Problem(name, f"{name}={error}", error.remedy))
        return None
    for rule, message, remedy in attribute.rules:
        inner = {**scope, "value": value}
        try:
            holds = evaluate(rule, inner)
        except _UnboundError:
            continue
        if not holds:
            problems.append(
                Problem(name, _fill(message, inner), _fill(remedy, inner))
            )
            return None
    return value


class _CastError(Exception):
    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.remedy = remedy


def _concrete(value: Any) -> Any:
    """A Python scalar of a scalar of any library."""
    if isinstance(value, jax.core.Tracer):
        raise _CastError(
            f"{value} is traced.",
            "It is static: pass a Python or numpy scalar, or a jax scalar made "
            "outside of jit.",
        )
    if isinstance(value, (np.ndarray, jax.Array)):
        if value.shape != ():
            raise _CastError(
                f"{value!r} must be a scalar, not of shape {value.shape}.",
                "Pass one number.",
            )
        return value.item()
    if isinstance(value, np.generic):
        return value.item()
    return value


def _to_float(value: Any) -> float:
    plain = _concrete(value)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real):
        raise _CastError(f"{plain!r} must be a real number.", "Pass a float.")
    try:
        return float(plain)
    except OverflowError:
        return math.inf  # Only an int can be too large; rules see its size.


def _to_int(value: Any) -> int:
    plain = _concrete(value)
    if isinstance(plain, bool) or not hasattr(plain, "__index__"):
        raise _CastError(
            f"{plain!r} must be an integer.", "Pass an int, or None for none."
        )
    return operator.index(plain)


def _to_bool(value: Any) -> bool:
    plain = _concrete(value)
    if not isinstance(plain, bool):
        raise _CastError(f"{plain!r} must be True or False.", "Pass a bool.")
    return plain


_CASTS = {"float": _to_float, "int": _to_int, "bool": _to_bool}
