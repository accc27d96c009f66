"""PagePool and Planner.step against a model of what the pages hold.

The model writes a value for every token into the pages that the planner names,
in every KV group. The value stands for the salt and all tokens up to it, as
keys and values do. So whoever is given a wrong page reads a wrong value.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pagemill
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pagemill import (
    CapacityError,
    LeaseError,
    PagemillError,
    PagePool,
    Planner,
    Sequence,
)
from pagemill.pool import PAGE_STATES

NUM_PAGES = 20
RING = 4
TOKENS = st.integers(0, 1)  # so few that prefixes collide
PICK = st.integers(0, 11)
# (page_size, sliding_windows, prefix_cache).
CONFIGURATIONS = [
    (1, (None,), True),
    (3, (None,), True),
    (16, (None,), True),
    (3, (None, 6), True),
    (1, (5,), True),
    (3, (5,), True),
    (16, (5,), True),
    (3, (None,), False),
    (1, (None, 6), False),
]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A token in a sequence: its id, its value, and the step it came with."""

    token: int
    value: int
    step: int | None


@dataclasses.dataclass(eq=False)
class Model:
    """A sequence: what the pool should think of it."""

    seq: Sequence
    salt: bytes
    known: list[int]
    placed: list[Placed]
    pending: bool = False  # its last slot waits for a copy
    swapping: bool = False
    host: dict[tuple[int, int], list[Any]] | None = None  # while swapped out

    def value_at(self, position: int, token: int) -> int:
        """What the token's keys and values depend on."""
        before = self.placed[position - 1].value if position else self.salt
        return hash((before, token))

    def append(self, token: int, step: int | None) -> Placed:
        value = self.value_at(len(self.placed), token)
        self.placed.append(Placed(token, value, step))
        return self.placed[-1]


@dataclasses.dataclass(eq=False)
class Leased:
    """A planned step, with copies of its arrays."""

    id: int
    step: pagemill.Step
    rows: list[tuple[Model, int, int]]  # sequence, tokens before, tokens
    touched: set[int]  # pages
    arrays: list[Any]
    # (row, its token) -> the cells it wrote.
    wrote: dict[tuple[int, int], list[tuple[int, int, int]]]
    open: bool = True
    in_flight: bool = True


class Machine(RuleBasedStateMachine):
    page_size: int
    windows: tuple[int | None, ...]
    prefix_cache: bool

    @initialize()
    def make(self) -> None:
        self.pool = PagePool(
            NUM_PAGES,
            self.page_size,
            sliding_windows=self.windows,
            prefix_cache=self.prefix_cache,
        )
        self.planner = Planner(
            self.pool,
            max_num_tokens=9 * self.page_size + 36,
            max_num_seqs=4,
            pages_per_seq=999,
            ring=RING,
            keep_rows=self.page_size == 3,
        )
        self.live: list[Model] = []
        self.steps: list[Leased] = []
        self.cells: dict[tuple[int, int, int], tuple[int, int | None]] = {}
        self.committed: set[int | None] = {None}
        self.ids = itertools.count()

    # -------------------------------------------------------------- helpers

    def passed(self, group: int, length: int) -> int:
        """Slots that no query at or past `length` sees."""
        window = self.windows[group]
        return (
            0
            if window is None
            else max(0, length - window + 1) // self.page_size
        )

    def slots(self, length: int) -> int:
        return -(-length // self.page_size)

    def pick(self, index: int, *, swapped: bool = False) -> Model | None:
        models = [m for m in self.live if swapped == (m.host is not None)]
        models = [m for m in models if not m.swapping]
        return models[index % len(models)] if models else None

    def any_placed(self) -> bool:
        return any(m.placed for m in self.live)

    def snapshot(self) -> Any:
        return (
            self.pool.stats(),
            [self.pool.page_state(p) for p in range(NUM_PAGES)],
            [self.pool.reference_count(p) for p in range(NUM_PAGES)],
            [
                (m.seq.length, m.seq.committed_length, self.pages(m))
                for m in self.live
            ],
        )

    def pages(self, model: Model) -> list[list[int]]:
        return [
            model.seq.pages_of(g).tolist() for g in range(len(self.windows))
        ]

    def attempt(self, call: Callable[[], Any], *refusals: type) -> Any:
        """The call's result; None when it fails, having changed nothing."""
        before = self.snapshot()
        refused: Exception
        try:
            return call()
        except (CapacityError, LeaseError, PagemillError) as error:
            refused = error
        assert isinstance(refused, refusals), refused
        assert self.snapshot() == before
        if isinstance(refused, CapacityError):
            assert refused.need > self.pool.num_available_pages
            assert refused.free == self.pool.stats().free
            assert refused.fenced == self.pool.stats().fenced
        return None

    def check_fresh(self, pages: set[int]) -> None:
        """Pages just handed out are of no step in flight."""
        for step in self.steps:
            assert not (step.in_flight and step.touched & pages)

    def check_hit(self, model: Model, length: int) -> None:
        """What the cache gave is right, and was certainly written."""
        assert length % self.page_size == 0
        assert length < max(len(model.known), 1)
        for token in model.known[:length]:
            model.append(token, None)
        for key, _ in self.locate(model):
            assert self.cells[key][1] in self.committed

    def locate(
        self, model: Model
    ) -> Iterator[tuple[tuple[int, int, int], Placed]]:
        """Where each token lies that a later query may see."""
        committed = self.committed_length(model)
        for group, pages in enumerate(self.pages(model)):
            assert len(pages) == self.slots(len(model.placed))
            for slot, page in enumerate(pages):
                begin = slot * self.page_size
                if page < 0:
                    assert slot < self.passed(group, committed)
                    continue
                if model.pending and slot == len(pages) - 1:
                    continue
                for offset, placed in enumerate(
                    model.placed[begin : begin + self.page_size]
                ):
                    yield (group, page, offset), placed

    def committed_length(self, model: Model) -> int:
        flags = [p.step in self.committed for p in model.placed]
        return flags.index(False) if False in flags else len(flags)

    # ------------------------------------------------------------ sequences

    @precondition(lambda self: len(self.live) < 7)
    @rule(
        tokens=st.lists(TOKENS, max_size=40), salt=st.sampled_from([b"", b"x"])
    )
    def open(self, tokens: list[int], salt: bytes) -> None:
        found = self.pool.probe(tokens, salt=salt)
        seq = self.pool.open(tokens, salt=salt)
        assert seq.num_cached_tokens == seq.length == found
        assert self.prefix_cache or found == 0
        self.live.append(Model(seq, salt, tokens, []))
        self.check_hit(self.live[-1], found)

    @precondition(lambda self: self.live)
    @rule(index=PICK, extra=st.lists(TOKENS, max_size=5))
    def extend(self, index: int, extra: list[int]) -> None:
        model = self.live[index % len(self.live)]
        told = [p.token for p in model.placed[len(model.known) :]] + extra
        self.pool.extend(model.seq, told)
        model.known = model.known + told

    @precondition(lambda self: 0 < len(self.live) < 7)
    @rule(index=PICK)
    def fork(self, index: int) -> None:
        if (model := self.pick(index)) is None:
            return
        seq = self.attempt(lambda: self.pool.fork(model.seq), CapacityError)
        if seq is None:
            return
        pending = len(model.placed) % self.page_size != 0
        twin = dataclasses.replace(
            model, seq=seq, placed=list(model.placed), pending=pending
        )
        self.live.append(twin)
        for mine, theirs in zip(
            self.pages(twin), self.pages(model), strict=True
        ):
            self.check_fresh(set(mine) - set(theirs))

    @precondition(lambda self: self.any_placed())
    @rule(index=PICK, back=st.integers(0, 9))
    def truncate(self, index: int, back: int) -> None:
        if (model := self.pick(index)) is None:
            return
        length = max(len(model.placed) - back, 0)
        before = self.pages(model)
        done = self.attempt(
            lambda: self.pool.truncate(model.seq, length) or True,
            CapacityError,
            *[PagemillError for w in self.windows if w is not None],
        )
        if done is None or length == len(model.placed):
            return
        if self.slots(length) < self.slots(len(model.placed)):
            model.pending = False
        del model.placed[length:]
        model.known = model.known[:length]
        for mine, old in zip(self.pages(model), before, strict=True):
            if mine and mine[-1] != old[len(mine) - 1]:
                self.check_fresh({mine[-1]})
                model.pending = True

    @precondition(lambda self: self.live)
    @rule(index=PICK)
    def close(self, index: int) -> None:
        model = self.live.pop(index % len(self.live))
        self.pool.close(model.seq)
        self.attempt(lambda: self.pool.close(model.seq), PagemillError)

    @precondition(lambda self: self.any_placed())
    @rule(index=PICK)
    def preempt(self, index: int) -> None:
        if (model := self.pick(index)) is None:
            return
        self.pool.preempt(model.seq)
        model.placed.clear()
        model.pending = False

    @precondition(lambda self: any(not m.placed for m in self.live))
    @rule(index=PICK)
    def resume(self, index: int) -> None:
        if (model := self.pick(index)) is None:
            return
        found = self.attempt(lambda: self.pool.resume(model.seq), PagemillError)
        assert (found is None) == bool(model.placed)
        if found is not None:
            self.check_hit(model, found)

    @precondition(lambda self: self.any_placed())
    @rule(index=PICK)
    def begin_swap_out(self, index: int) -> None:
        if (model := self.pick(index)) is None:
            return
        pages = self.attempt(
            lambda: self.pool.begin_swap_out(model.seq), PagemillError
        )
        if pages is None:
            assert model.pending or any(s.open for s in self.steps)
            return
        assert pages.T.tolist() == self.pages(model)
        model.swapping = True

    @precondition(lambda self: any(m.swapping for m in self.live))
    @rule(index=PICK)
    def end_swap_out(self, index: int) -> None:
        models = [m for m in self.live if m.swapping]
        model = models[index % len(models)]
        model.host = {
            (slot, group): self.read_page(group, page)
            for group, pages in enumerate(self.pages(model))
            for slot, page in enumerate(pages)
        }
        self.pool.end_swap_out(model.seq)
        model.swapping = False

    @precondition(lambda self: any(m.host is not None for m in self.live))
    @rule(index=PICK)
    def swap_in(self, index: int) -> None:
        if (model := self.pick(index, swapped=True)) is None:
            return
        filled = self.attempt(
            lambda: self.pool.swap_in(model.seq), CapacityError
        )
        if filled is None:
            return
        host, model.host = model.host, None
        assert host is not None
        self.check_fresh({int(p) for p in filled.flat if p >= 0})
        for (slot, group), page in np.ndenumerate(filled):
            if page >= 0:
                self.write_page(group, int(page), host[slot, group])

    def read_page(self, group: int, page: int) -> list[Any]:
        return [self.cells.get((group, page, i)) for i in range(self.page_size)]

    def write_page(self, group: int, page: int, cells: list[Any]) -> None:
        for i, cell in enumerate(cells):
            self.cells.pop((group, page, i), None)
            if cell is not None:
                self.cells[group, page, i] = cell

    # ----------------------------------------------------------- the whole

    @rule()
    def clear_cache(self) -> None:
        evictable = self.pool.stats().evictable
        assert self.pool.clear_cache() == evictable

    @rule()
    def take_page_copies(self) -> None:
        for source, target in self.pool.take_page_copies().tolist():
            for group in range(len(self.windows)):
                self.write_page(group, target, self.read_page(group, source))
        for model in self.live:
            model.pending = False

    # --------------------------------------------------------------- steps

    @rule(
        wanted=st.lists(
            st.tuples(PICK, st.integers(1, 9)),
            max_size=4,
            unique_by=lambda w: w[0],
        ),
        rest=st.lists(TOKENS, min_size=9, max_size=9),
        over=st.booleans(),
    )
    def step(
        self, wanted: list[tuple[int, int]], rest: list[int], over: bool
    ) -> None:
        rows = [
            (self.live[i], len(self.live[i].placed), self.scaled(count))
            for i, count in wanted
            if i < len(self.live)
        ]
        before = {id(m): self.pages(m) for m, _, _ in rows}
        step = self.attempt(
            lambda: self.planner.step([(m.seq, n) for m, _, n in rows]),
            CapacityError,
            *[
                PagemillError
                for m, _, _ in rows
                if m.pending or m.swapping or m.host is not None
            ],
            *[LeaseError for _ in range(self.leases() == RING)],
        )
        if step is None:
            return
        ordered = [rows[i] for i in step.order]
        assert {id(m) for m, _, _ in ordered} == {id(m) for m, _, _ in rows}
        leased = Leased(
            next(self.ids), step, ordered, set(), arrays_of(step), {}
        )
        fresh: set[int] = set()
        for row, (model, length, count) in enumerate(ordered):
            for i in range(count):
                known = model.known[length + i :][:1]
                model.append((known or rest[i % len(rest) :])[0], leased.id)
            for group, pages in enumerate(self.pages(model)):
                fresh |= set(pages) - set(before[id(model)][group])
                leased.touched |= {p for p in pages if p >= 0}
                self.launch(leased, group, row)
        self.check_fresh(fresh)
        self.steps.append(leased)
        for batch, window in zip(step.batches, self.windows, strict=True):
            if window is None:
                pagemill.validate(batch)
        if over:
            self.commit(-1, None)
            self.retire(-1)

    def scaled(self, count: int) -> int:
        """Some counts are larger where pages are."""
        return count * max(self.page_size // 4, 1) if count > 5 else count

    def launch(self, leased: Leased, group: int, row: int) -> None:
        """Writes the row's tokens where the batch says."""
        model, length, count = leased.rows[row]
        batch = leased.step.batches[group]
        begin, end = batch.cu_q_lens[row : row + 2]
        assert end - begin == count
        assert batch.kv_lens[row] == length + count
        for i in range(count):
            page, offset = divmod(
                int(batch.slot_mapping[begin + i]), self.page_size
            )
            placed = model.placed[length + i]
            self.cells[group, page, offset] = (placed.value, placed.step)
            leased.wrote.setdefault((row, i), []).append((group, page, offset))
            assert leased.step.positions[begin + i] == length + i
        assert leased.step.logits_indices[row] == end - 1

    def leases(self) -> int:
        return sum(s.open or s.in_flight for s in self.steps)

    @precondition(lambda self: any(s.open for s in self.steps))
    @rule(index=PICK, accepted=st.none() | st.lists(st.integers(0, 9)))
    def commit(self, index: int, accepted: list[int] | None) -> None:
        steps = [s for s in self.steps if s.open]
        leased = steps[index % len(steps)]
        kept = [n for _, _, n in leased.rows]
        if accepted is not None:
            kept = [min(a, n) for a, n in zip(accepted, kept, strict=False)]
            kept += [n for _, _, n in leased.rows[len(kept) :]]
            done = self.attempt(
                lambda: leased.step.commit(kept) or True, PagemillError
            )
            if done is None:
                return
        else:
            leased.step.commit()
        leased.open = False
        self.committed.add(leased.id)
        for row, (model, _, count) in enumerate(leased.rows):
            if self.take_back(leased, row, kept[row]) and kept[row] < count:
                model.known = model.known[: len(model.placed)]
        self.forget_closed()

    @precondition(lambda self: any(s.open for s in self.steps))
    @rule(index=PICK)
    def abort(self, index: int) -> None:
        steps = [s for s in self.steps if s.open]
        leased = steps[index % len(steps)]
        done = self.attempt(lambda: leased.step.abort() or True, PagemillError)
        if done is None:
            return
        leased.open = False
        for row in range(len(leased.rows)):
            self.take_back(leased, row, 0)
        for model in self.live:
            assert all(p.step != leased.id for p in model.placed)
        self.forget_closed()

    def take_back(self, leased: Leased, row: int, kept: int) -> bool:
        """Makes the row's other tokens never have been; whether any were."""
        model, length, count = leased.rows[row]
        for i in range(kept, count):
            for key in leased.wrote[row, i]:
                if self.cells.get(key, (0, None))[1] == leased.id:
                    del self.cells[key]
        gone = [p.step == leased.id for p in model.placed[length + kept :]]
        if model not in self.live or not any(gone):
            return False
        assert all(gone)
        del model.placed[length + kept :]
        return True

    @precondition(lambda self: any(s.in_flight for s in self.steps))
    @rule(index=PICK)
    def retire(self, index: int) -> None:
        steps = [s for s in self.steps if s.in_flight]
        leased = steps[index % len(steps)]
        leased.step.retire(done=True)
        leased.in_flight = False
        self.forget_closed()

    def forget_closed(self) -> None:
        self.steps = [s for s in self.steps if s.open or s.in_flight]

    # ----------------------------------------------------------- invariants

    @invariant()
    def audit(self) -> None:
        self.pool.audit()
        stats = self.pool.stats()
        states = [self.pool.page_state(p) for p in range(NUM_PAGES)]
        for state in PAGE_STATES:
            assert getattr(stats, state) == states.count(state)
        assert stats.sequences == self.pool.num_sequences == len(self.live)
        in_flight = sum(s.in_flight for s in self.steps)
        assert stats.steps_in_flight == in_flight
        assert in_flight or stats.fenced == 0
        if not any(s.open for s in self.steps):
            assert stats.reserved == 0
        assert stats.held_tokens <= stats.held_slots
        assert 0 <= stats.fragmentation <= 1

    @invariant()
    def contents(self) -> None:
        still = not any(s.open for s in self.steps)
        for model in self.live:
            assert model.seq.length == len(model.placed)
            committed = self.committed_length(model)
            assert model.seq.committed_length <= committed
            assert not still or model.seq.committed_length == committed
            if model.host is None:
                for key, placed in self.locate(model):
                    assert self.cells[key][0] == placed.value

    @invariant()
    def leases_hold(self) -> None:
        for leased in self.steps:
            for was, now in zip(
                leased.arrays, arrays_of(leased.step), strict=True
            ):
                np.testing.assert_array_equal(was, now)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for leased in self.steps:
            if leased.open:
                leased.step.commit()
            if leased.in_flight:
                leased.step.retire(done=True)
        for model in self.live:
            self.pool.close(model.seq)
        stats = self.pool.stats()
        assert stats.free + stats.evictable == NUM_PAGES
        assert self.pool.clear_cache() == stats.evictable
        assert self.pool.num_free_pages == NUM_PAGES
        self.pool.audit()


def arrays_of(step: pagemill.Step) -> list[Any]:
    """Copies of all that a step leases."""
    arrays = [step.positions, step.logits_indices]
    for b in step.batches:
        arrays += [b.kv_lens, b.page_indices, b.cu_q_lens, b.num_seqs]
        arrays += [b.distribution, b.slot_mapping]
    return [np.array(a) for a in arrays]


@pytest.mark.parametrize(
    ("page_size", "windows", "prefix_cache"), CONFIGURATIONS
)
def test_pages_hold_what_sequences_wrote(
    page_size: int, windows: tuple[int | None, ...], prefix_cache: bool
) -> None:
    namespace = {
        "page_size": page_size,
        "windows": windows,
        "prefix_cache": prefix_cache,
    }
    run_state_machine_as_test(
        type("Configured", (Machine,), namespace),
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
