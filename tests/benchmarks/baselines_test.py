"""NumPy and numba accept what pagemill accepts, and write what it writes."""

import functools

import numpy as np
import pagemill
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.peers.numba_validators import NumbaValidator
from benchmarks.peers.numpy_planner import NumpyPlanner
from benchmarks.peers.numpy_validators import NumpyValidator

PAGE = 4
ROWS, COLUMNS, TOKENS, PAGES = 8, 6, 24, 64
NONSENSE = [-(2**31), -1, 0, 1, 3, 25, PAGES, 2**31 - 1]
SIZES = {"page_size": PAGE, "total_num_pages": PAGES, "max_num_tokens": TOKENS}


@functools.cache
def validators():
    return (
        NumpyValidator(max_num_seqs=ROWS, pages_per_seq=COLUMNS, **SIZES),
        NumbaValidator(**SIZES),
    )


def pagemill_accepts(*batch):
    names = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    try:
        pagemill.validate(**dict(zip(names, batch, strict=True)), **SIZES)
    except pagemill.PagemillError:
        return False
    return True


def verdicts(batch):
    """What each says; twice, for what a call might leave behind."""
    said = [f(*batch) for f in (pagemill_accepts, *validators(), *validators())]
    assert len(set(said)) == 1, said
    return said[0]


def make_batch(seqs, rng, *, share=0):
    """A sound batch of (q_len, kv_len); what is dead is nonsense.

    Its first `share` pages are the same in every row long enough to only read
    them.
    """
    kv_lens = rng.choice(NONSENSE, ROWS).astype(np.int32)
    page_indices = rng.choice(NONSENSE, (ROWS, COLUMNS)).astype(np.int32)
    cu_q_lens = rng.choice(NONSENSE, ROWS + 1).astype(np.int32)
    cu_q_lens[: len(seqs) + 1] = np.cumsum([0, *(q for q, _ in seqs)])
    free = list(rng.permutation(PAGES))
    shared = [free.pop() for _ in range(share)]
    for row, (q, kv) in enumerate(seqs):
        kv_lens[row] = kv
        head = shared[: (kv - q) // PAGE]
        tail = [free.pop() for _ in range(-(-kv // PAGE) - len(head))]
        page_indices[row, : len(head + tail)] = head + tail
    return kv_lens, page_indices, cu_q_lens, len(seqs)


@st.composite
def batches(draw):
    lengths = st.integers(0, COLUMNS * PAGE)
    seqs = []
    for _ in range(draw(st.integers(0, ROWS))):
        kv = draw(lengths)
        room = TOKENS - sum(q for q, _ in seqs)
        seqs.append((draw(st.sampled_from([0, 1, 1, min(kv, 9)])), kv))
        seqs[-1] = (min(seqs[-1][0], kv, room), kv)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return make_batch(seqs, rng, share=draw(st.integers(0, 3)))


@given(batches())
@settings(max_examples=200, deadline=None)
def test_all_accept_sound_batches(batch):
    assert verdicts(batch)


@given(
    batches(),
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, ROWS * COLUMNS),
            st.sampled_from(NONSENSE) | st.integers(0, PAGES),
        ),
        max_size=2,
    ),
)
@settings(max_examples=1000, deadline=None)
def test_all_agree_on_batches_with_faults(batch, faults):
    for array, index, value in faults:
        flat = batch[array].reshape(-1)
        flat[index % flat.size] = value
    verdicts(batch)


DECODE_AND_CHUNK = [(1, 9), (1, 8), (6, 14), (0, 5)]


@pytest.mark.parametrize(
    ("array", "index", "value"),
    [
        ("cu_q_lens", 0, 1),
        ("cu_q_lens", 2, 0),  # falls
        ("cu_q_lens", 4, TOKENS + 1),
        ("kv_lens", 0, 0),  # q_len 1
        ("kv_lens", 3, -1),
        ("kv_lens", 2, COLUMNS * PAGE + 1),
        ("page_indices", (0, 2), -1),
        ("page_indices", (2, 0), PAGES),
        ("page_indices", (2, 3), 2**31 - 1),
        ("page_indices", (0, 2), (1, 1)),  # written twice
        ("page_indices", (2, 3), (2, 2)),  # twice by one sequence
        ("page_indices", (3, 1), (2, 3)),  # read by another
        ("page_indices", (1, 0), (1, 1)),  # read by its writer
    ],
)
def test_all_refuse(array, index, value):
    names = ("kv_lens", "page_indices", "cu_q_lens")
    batch = make_batch(DECODE_AND_CHUNK, np.random.default_rng(0))
    assert verdicts(batch)
    target = batch[names.index(array)]
    target[index] = target[value] if isinstance(value, tuple) else value
    assert not verdicts(batch)


@pytest.mark.parametrize("seed", range(5))
def test_numpy_planner_writes_what_the_planner_writes(seed):
    rng = np.random.default_rng(seed)
    pool = pagemill.PagePool(total_num_pages=PAGES, page_size=PAGE)
    planner = pagemill.Planner(pool, TOKENS, ROWS, COLUMNS)
    baseline = NumpyPlanner(
        max_num_tokens=TOKENS,
        max_num_seqs=ROWS,
        pages_per_seq=COLUMNS,
        page_size=PAGE,
    )
    seqs = [pool.open() for _ in range(ROWS)]
    for step in range(6):
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]
        most = 2 if step % 2 else 4  # decodes only, or chunks too
        counts = rng.integers(1, most, len(rows)).astype(np.int32)
        batch = planner.plan(
            [(seqs[row], int(n)) for row, n in zip(rows, counts, strict=True)]
        )
        for row in rows:
            pages = seqs[row].pages
            baseline.page_table[row, : len(pages)] = pages
        written = baseline.plan(rows, counts)
        np.testing.assert_array_equal(written.order, planner.order)
        for name in (
            "kv_lens",
            "page_indices",
            "cu_q_lens",
            "num_seqs",
            "distribution",
            "slot_mapping",
        ):
            np.testing.assert_array_equal(
                getattr(written, name), getattr(batch, name), name
            )
