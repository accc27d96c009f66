"""How many tokens a step takes, and which capacities its programs have.

:func:`split_by_budget` shares a step's tokens among requests,
:func:`trace_step_sizes` does so step by step for a trace of requests, and
:func:`propose_buckets` finds the ladder of capacities that pads the sizes seen
least. Together they give a planner its buckets::

    tokens, seqs = pagemill.trace_step_sizes(requests, 2048, 256)
    token_plan = pagemill.propose_buckets(tokens, 8, multiple_of=16)
    seq_plan = pagemill.propose_buckets(seqs, 4, other=token_plan)
    planner = pagemill.Planner(
        pool, token_plan.buckets[-1], seq_plan.buckets[-1], pages_per_seq,
        token_buckets=token_plan.buckets, seq_buckets=seq_plan.buckets)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from pagemill.batch import as_int32
from pagemill.errors import PagemillError
from pagemill.pool import Int32Array, as_count

_MAX_CANDIDATES = 512


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """A ladder of capacities for sizes that were seen.

    Attributes:
      buckets: the capacities, ascending; the last holds the largest size.
      padding: share of entries that are padding when each size takes the
        smallest bucket that holds it.
      programs: how many programs a step can compile to: the buckets, times
        those of the other ladder if one was given.
    """

    buckets: tuple[int, ...]
    padding: float
    programs: int


def propose_buckets(
    sizes: Any,
    max_buckets: int,
    *,
    multiple_of: int = 1,
    other: BucketPlan | None = None,
) -> BucketPlan:
    """The ladder that pads the sizes least.

    Exact where the sizes, rounded up, take 512 values or fewer; otherwise the
    range is cut into 512 equal cells, and a bucket may be as much as a cell
    too large. O(max_buckets * 512^2).

    Args:
      sizes: of steps that were seen, such as their tokens; all at least 1.
      max_buckets: buckets in the ladder, at most.
      multiple_of: buckets are multiples of it.
      other: a ladder for another size of the same steps: programs counts the
        combinations.

    Raises:
      PagemillError: no sizes, or values out of range.
    """
    sizes = _sizes(sizes)
    max_buckets = _positive("max_buckets", max_buckets)
    multiple = _positive("multiple_of", multiple_of)
    rounded = -(-sizes // multiple) * multiple
    if rounded.max() >= 2**31:
        raise PagemillError(
            f"multiple_of={multiple} rounds a size up to {rounded.max()}, "
            "which int32 cannot hold. Lower it."
        )
    values, counts = np.unique(rounded, return_counts=True)
    buckets = _best_ladder(*_merge_close(values, counts), max_buckets)
    held = buckets[np.searchsorted(buckets, sizes)]
    return BucketPlan(
        buckets=tuple(buckets.tolist()),
        padding=float(1 - sizes.sum() / held.sum()),
        programs=buckets.size * (len(other.buckets) if other else 1),
    )


def split_by_budget(
    remaining: Any,
    budget: int,
    *,
    max_num_seqs: int | None = None,
    chunk_multiple: int = 1,
) -> Int32Array:
    """Shares a step's tokens among requests.

    Decodes (requests with one token left to compute) get theirs first, then
    prompts in order, each all it needs, until one does not fit: it gets the
    rest as a chunk, and those after it nothing. O(requests).

    Args:
      remaining: i32[n], tokens that each request has yet to compute; 0 for one
        that wants nothing.
      budget: tokens of the step, at most.
      max_num_seqs: requests that get tokens, at most.
      chunk_multiple: the chunk is rounded down to a multiple of it, if it is
        not smaller than that.

    Returns:
      i32[n]: the tokens of each request.

    Raises:
      PagemillError: values out of range.
    """
    remaining = np.asarray(as_int32("remaining", remaining))
    if remaining.ndim != 1:
        raise PagemillError(
            f"remaining has shape {remaining.shape}; it must be "
            "one-dimensional: the tokens left of each request."
        )
    if remaining.size and remaining.min() < 0:
        at = int(remaining.argmin())
        raise PagemillError(
            f"remaining[{at}]={remaining[at]} must not be negative. Pass 0 for "
            "a request that wants nothing."
        )
    budget = _not_negative("budget", budget)
    multiple = _positive("chunk_multiple", chunk_multiple)
    limit = remaining.size
    if max_num_seqs is not None:
        limit = _not_negative("max_num_seqs", max_num_seqs)
    return _split(remaining, budget, limit, multiple)


def trace_step_sizes(
    requests: Iterable[tuple[int, int]],
    max_num_tokens: int,
    max_num_seqs: int,
    *,
    chunk_multiple: int = 1,
) -> tuple[Int32Array, Int32Array]:
    """The sizes of the steps that would serve a trace of requests.

    All requests wait from the start and are let in, in order, as rows get free;
    each step is shared out by :func:`split_by_budget`, so that prompts are
    computed in chunks beside the decodes. A prompt's last chunk gives the first
    token of the output. Pages never run out, and nothing is cached. O(tokens of
    outputs).

    Args:
      requests: pairs (prompt, output) of lengths in tokens, at least 1.
      max_num_tokens: tokens in a step, at most.
      max_num_seqs: sequences in a step, at most.
      chunk_multiple: as of :func:`split_by_budget`.

    Returns:
      tokens, seqs: i32[steps] each.

    Raises:
      PagemillError: values out of range.
    """
    budget = _positive("max_num_tokens", max_num_tokens)
    seats = _positive("max_num_seqs", max_num_seqs)
    multiple = _positive("chunk_multiple", chunk_multiple)
    prompts, outputs = _requests(requests)
    waiting = 0
    prompt, decodes = np.empty(0, np.int32), np.empty(0, np.int32)
    tokens: list[Any] = []
    seqs: list[Any] = []
    while True:
        # Those let in first stand first.
        free = seats - prompt.size
        prompt = np.concatenate([prompt, prompts[waiting:][:free]])
        decodes = np.concatenate([decodes, outputs[waiting:][:free] - 1])
        waiting += free
        if not prompt.size:
            return np.array(tokens, np.int32), np.array(seqs, np.int32)
        decoding = prompt == 0
        counts = _split(np.where(decoding, 1, prompt), budget, seats, multiple)
        tokens.append(counts.sum())
        seqs.append(np.count_nonzero(counts))
        decodes = decodes - (decoding & (counts > 0))
        prompt = prompt - np.where(decoding, 0, counts)
        stays = (prompt > 0) | (decodes > 0)
        if not stays.all():
            prompt, decodes = prompt[stays], decodes[stays]


def _split(
    remaining: Int32Array, budget: int, max_num_seqs: int, multiple: int
) -> Int32Array:
    order = np.concatenate(
        [np.flatnonzero(remaining == 1), np.flatnonzero(remaining > 1)]
    )[:max_num_seqs]
    wanted = remaining[order]
    ends = np.cumsum(wanted, dtype=np.int64)
    fit = int(np.searchsorted(ends, budget, side="right"))
    counts = np.zeros_like(remaining)
    counts[order[:fit]] = wanted[:fit]
    if fit < order.size:
        rest = budget - (int(ends[fit - 1]) if fit else 0)
        counts[order[fit]] = rest // multiple * multiple or rest
    return counts


def _merge_close(values: Any, counts: Any) -> tuple[Any, Any]:
    """At most _MAX_CANDIDATES values: each cell's largest stands for all."""
    if values.size <= _MAX_CANDIDATES:
        return values, counts
    width = int(values[-1] - values[0]) // _MAX_CANDIDATES + 1
    cells = (values - values[0]) // width
    last = np.flatnonzero(np.diff(cells, append=-1))
    starts = np.concatenate([[0], last[:-1] + 1])
    return values[last], np.add.reduceat(counts, starts)


def _best_ladder(values: Any, counts: Any, max_buckets: int) -> Any:
    """The values to take as buckets; dynamic programming.

    What counts is the entries that all sizes take in their buckets. With
    ``best[i]`` the fewest for values 0 to i in k buckets, k + 1 buckets take
    ``min over j of best[j] + (sizes of values j + 1 to i) * values[i]``. More
    buckets are always better, up to one a value.
    """
    never = np.iinfo(np.int64).max // 2
    below = np.concatenate([[0], np.cumsum(counts)])
    sizes = below[1:] - below[:-1, None]  # of values j to i, at [j, i]
    taken = np.where(sizes > 0, sizes * values, never)
    best, cuts = taken[0], []
    for _ in range(1, min(max_buckets, values.size)):
        total = best[:-1, None] + taken[1:]
        cuts.append(total.argmin(axis=0))
        best = np.minimum(total.min(axis=0), never)
    ladder = [values.size - 1]
    for cut in reversed(cuts):
        ladder.append(int(cut[ladder[-1]]))
    return values[ladder[::-1]]


def _requests(requests: Any) -> tuple[Int32Array, Int32Array]:
    pairs = np.asarray(as_int32("requests", _listed(requests)))
    if pairs.size == 0:
        pairs = pairs.reshape(0, 2)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise PagemillError(
            f"requests has shape {pairs.shape}; it must be pairs (prompt, "
            "output) of lengths in tokens."
        )
    wrong = np.argwhere(pairs < 1)
    if wrong.size:
        row, column = wrong[0]
        raise PagemillError(
            f"requests[{row}]={tuple(pairs[row].tolist())}: the "
            f"{('prompt', 'output')[column]} must be at least 1. Leave out "
            "requests that compute nothing."
        )
    return pairs[:, 0], pairs[:, 1]


def _sizes(sizes: Any) -> Any:
    array: Any = np.asarray(as_int32("sizes", _listed(sizes)), np.int64)
    if array.ndim != 1 or array.size == 0:
        raise PagemillError(
            f"sizes has shape {array.shape}; it must be one-dimensional, with "
            "at least one entry."
        )
    if array.min() < 1:
        at = int(array.argmin())
        raise PagemillError(
            f"sizes[{at}]={array[at]} must be at least 1. Leave idle steps out."
        )
    return array


def _listed(values: Any) -> Any:
    """Also of a generator."""
    plain = isinstance(values, Iterable) and not hasattr(values, "shape")
    return list(values) if plain else values


def _positive(name: str, value: Any) -> int:
    value = as_count(name, value)
    if not 1 <= value < 2**31:
        raise PagemillError(f"{name}={value} must be in range [1, 2147483647].")
    return value


def _not_negative(name: str, value: Any) -> int:
    value = as_count(name, value)
    if value < 0:
        raise PagemillError(f"{name}={value} must not be negative.")
    return value
