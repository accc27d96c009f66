"""What every implementation of ragged paged attention must do.

A test file subclasses :class:`Suite` and says how its implementation is
called. Inputs are drawn by pagemill.testing.batches: shuffled, and poisoned
wherever an implementation has no business.
"""

from __future__ import annotations

import abc
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kv_cache import KVLayout
from pagemill.params import AttentionParams
from pagemill.testing import oracle
from pagemill.testing.batches import Batch, random_batch

DTYPES = ("float32", "bfloat16")
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
# (q_len, kv_len): decodes, whole prompts, chunks, and lengths around a page.
MIXED = ((1, 40), (1, 1), (20, 20), (5, 37), (1, 16), (3, 17))


def b0(dtype: Any = np.float32) -> Batch:
    """One sequence prefilling 8 of 20 tokens, one decoding at 9."""
    batch = random_batch(
        ((8, 20), (1, 9)), dtype=dtype, max_num_tokens=16, max_num_seqs=2
    )
    return batch.replace(page_indices=batch.page_indices[:, :2].copy())


def scales() -> dict[str, Any]:
    """For two KV heads."""
    return {
        "k_scale": np.array([0.5, 1.5], np.float32),
        "v_scale": np.array([2.0, 0.25], np.float32),
    }


def laid_out(kv_pages: Any, layout: KVLayout) -> Any:
    """Interleaved pages in another layout."""
    if layout is KVLayout.INTERLEAVED:
        return kv_pages
    pages, size, combined, dim = kv_pages.shape
    lanes = -(-dim // 128) * 128
    if layout is KVLayout.PLANES:
        heads = combined // 2
        planes = np.zeros((pages, 2, heads, size, lanes), kv_pages.dtype)
        split = kv_pages.reshape(pages, size, heads, 2, dim)
        planes[..., :dim] = split.transpose(0, 3, 2, 1, 4)
        return planes
    pack = 4 // kv_pages.dtype.itemsize
    groups = -(-combined // pack)
    packed = np.zeros((pages, size, groups * pack, lanes), kv_pages.dtype)
    packed[:, :, :combined, :dim] = kv_pages
    return packed.reshape(pages, size, groups, pack, lanes)


class Harness(abc.ABC):
    """Holds an implementation against the oracle."""

    layout = KVLayout.INTERLEAVED

    @abc.abstractmethod
    def attend(self, operands: Operands, params: AttentionParams) -> Any:
        """Runs the implementation: gives out and lse."""

    def run_all(
        self,
        batch: Batch,
        extras: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Out and lse, dead rows checked; extras are Operands' fields."""
        options.setdefault("sm_scale", batch.q.shape[-1] ** -0.5)
        kv_pages = laid_out(batch.kv_pages, self.layout)
        operands = Operands(
            *batch.replace(kv_pages=kv_pages).operands, **(extras or {})
        )
        out, lse = self.attend(
            jax.tree.map(jnp.asarray, operands),
            AttentionParams(
                num_kv_heads=batch.kv_pages.shape[2] // 2,
                kv_layout=self.layout,
                return_lse=True,
                **options,
            ),
        )
        assert out.shape == batch.q.shape
        assert out.dtype == batch.q.dtype
        assert lse.shape == batch.q.shape[:2]
        out, lse = np.asarray(out), np.asarray(lse)
        dead = slice(batch.num_tokens, None)
        # Not just small: exactly 0, and no NaN.
        np.testing.assert_array_equal(out[dead].astype(np.float32), 0.0)
        np.testing.assert_array_equal(lse[dead], -np.inf)
        return out, lse

    def run(self, batch: Batch, **options: Any) -> np.ndarray[Any, Any]:
        return self.run_all(batch, **options)[0]

    def check(
        self,
        batch: Batch,
        extras: dict[str, Any] | None = None,
        **options: Any,
    ) -> np.ndarray[Any, Any]:
        options.setdefault("sm_scale", batch.q.shape[-1] ** -0.5)
        out, lse = self.run_all(batch, extras, **options)
        expected, expected_lse = oracle.ragged_paged_attention_and_lse(
            *batch.operands, **(extras or {}), **options
        )
        # Values that are stored scaled down come out scaled up.
        scale = np.max((extras or {}).get("v_scale", 1.0))
        scale *= 20 if batch.kv_pages.dtype.kind == "i" else 1
        tolerance = TOLERANCES[batch.q.dtype.name]
        np.testing.assert_allclose(
            out.astype(np.float64),
            expected,
            atol=tolerance * scale,
            rtol=tolerance,
        )
        np.testing.assert_allclose(
            lse, expected_lse, atol=tolerance, rtol=tolerance
        )
        return out


class Suite(Harness):
    """The tests; subclasses are named Test*."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("head_dim", "options"),
        [
            (128, {}),
            (64, {"sliding_window": 9}),
            (80, {"soft_cap": 5.0}),
            (128, {"causal": False, "sliding_window": 4}),
        ],
        ids=str,
    )
    def test_sinks(
        self, head_dim: int, options: dict[str, Any], dtype: str
    ) -> None:
        """Small ones, large ones, one that takes all and one that does not."""
        sinks = np.array([0.5, 4.0, 300.0, -np.inf], np.float32)
        batch = random_batch(MIXED, head_dim=head_dim, dtype=jnp.dtype(dtype))
        self.check(batch, {"sinks": sinks}, **options)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
    def test_float8(self, kv_dtype: str, dtype: str) -> None:
        """C46: pages of 8 bits, a factor per head or none."""
        batch = random_batch(
            MIXED,
            page_size=32,
            dtype=jnp.dtype(dtype),
            kv_dtype=jnp.dtype(kv_dtype),
        )
        self.check(batch)
        self.check(batch, scales(), sliding_window=9)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_int8(self, dtype: str) -> None:
        """C46."""
        batch = random_batch(
            MIXED, page_size=32, dtype=jnp.dtype(dtype), kv_dtype=np.int8
        )
        small = {name: scale / 20 for name, scale in scales().items()}
        self.check(batch, small)
        self.check(batch, small, soft_cap=3.0)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("words", [1, 2])
    def test_tree_mask(self, words: int, dtype: str) -> None:
        """Each token sees those of its step that its bits name."""
        batch = random_batch(
            ((1, 40), (5, 37), (1, 1), (20, 20), (32, 33), (3, 17)),
            dtype=jnp.dtype(dtype),
        )
        rng = np.random.default_rng(7)
        shape = (len(batch.q), words)
        tree_mask = rng.integers(0, 2**32, shape, np.uint32)
        self.check(batch, {"tree_mask": tree_mask})
        self.check(batch, {"tree_mask": tree_mask}, sliding_window=8)

    def test_tree_of_a_chain_is_causal(self) -> None:
        batch = random_batch(MIXED, dtype=jnp.dtype(jnp.bfloat16))
        tree_mask = np.zeros((len(batch.q), 1), np.uint32)
        for seq in range(len(MIXED)):
            rows = batch.rows(seq)
            for i, row in enumerate(range(rows.start, rows.stop)):
                tree_mask[row] = (1 << (i + 1)) - 1
        out = self.check(batch, {"tree_mask": tree_mask})
        np.testing.assert_allclose(
            out.astype(np.float32),
            self.run(batch).astype(np.float32),
            atol=1e-2,
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_everything_at_once(self, dtype: str) -> None:
        batch = random_batch(MIXED, dtype=jnp.dtype(dtype))
        tree_mask = np.full((len(batch.q), 1), 0x5F5F5F5F, np.uint32)
        sinks = np.array([0.5, 4.0, -3.0, 1.0], np.float32)
        self.check(
            batch,
            {"sinks": sinks, "tree_mask": tree_mask, **scales()},
            sliding_window=30,
            soft_cap=4.0,
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"causal": False},
            {"soft_cap": 2.0},
            {"sliding_window": 3},
            {"sliding_window": 17, "soft_cap": 5.0},
            {"sliding_window": 6, "causal": False},
        ],
        ids=str,
    )
    def test_mixed_batch(self, options: dict[str, Any], dtype: str) -> None:
        self.check(random_batch(MIXED, dtype=jnp.dtype(dtype)), **options)

    @pytest.mark.parametrize(
        ("heads", "dtype"),
        [
            ((8, 8), "float32"),
            ((25, 5), "float32"),
            ((1, 1), "float32"),
            ((8, 2), "bfloat16"),
            ((25, 5), "bfloat16"),
            ((7, 1), "bfloat16"),
            ((12, 12), "bfloat16"),
            ((9, 3), "bfloat16"),
        ],
        ids=str,
    )
    def test_head_counts(self, heads: tuple[int, int], dtype: str) -> None:
        """C36."""
        self.check(
            random_batch(
                ((8, 20), (1, 9)),
                num_q_heads=heads[0],
                num_kv_heads=heads[1],
                dtype=jnp.dtype(dtype),
            )
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
    def test_head_dims(self, head_dim: int, dtype: str) -> None:
        """C34."""
        self.check(
            random_batch(
                ((8, 20), (1, 9)), head_dim=head_dim, dtype=jnp.dtype(dtype)
            )
        )

    @pytest.mark.parametrize(
        ("page_size", "dtype"),
        [
            (1, "float32"),
            (8, "float32"),
            (128, "float32"),
            (1, "bfloat16"),
            (2, "bfloat16"),
            (32, "bfloat16"),
        ],
    )
    def test_page_sizes(self, page_size: int, dtype: str) -> None:
        """C38."""
        self.check(
            random_batch(
                ((8, 20), (1, 9), (2, 130)),
                page_size=page_size,
                dtype=jnp.dtype(dtype),
            )
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("border", [16, 32, 128, 256, 512])
    def test_lengths_around_a_border(self, border: int, dtype: str) -> None:
        """Of a page, and of blocks and their parts; decodes and chunks."""
        lengths = (border - 1, border, border + 1)
        self.check(
            random_batch(
                [(q_len, kv_len) for kv_len in lengths for q_len in (1, 7)],
                dtype=jnp.dtype(dtype),
                pages_per_seq=64,
            )
        )

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_windows(self, head_dim: int) -> None:
        """C24; a window of all keys is no window, bit for bit."""
        batch = random_batch(((1, 100), (4, 50)), head_dim=head_dim)
        unbounded = self.check(batch)
        for window in (1, 3, 16, 17, 100, 2**31 - 1):
            out = self.check(batch, sliding_window=window)
            if window >= 100:
                np.testing.assert_array_equal(out, unbounded)

    @pytest.mark.parametrize("window", [1, 2, 64])
    def test_window_counts_keys(self, window: int) -> None:
        """C66: with q = 0 the weights are 1 / keys, and V counts them."""
        batch = random_batch(((70, 80),), head_dim=128)
        q, kv_pages = np.zeros_like(batch.q), np.zeros_like(batch.kv_pages)
        slots = batch.pages(0)[:, None] * 16 + np.arange(16)
        flat = kv_pages.reshape(-1, *kv_pages.shape[2:])
        for position, slot in enumerate(slots.reshape(-1)[:80]):
            flat[slot, 1::2, position] = 1.0
        out = self.run(
            batch.replace(q=q, kv_pages=kv_pages), sliding_window=window
        )
        for row in range(70):
            seen = np.flatnonzero(out[row, 0])
            position = 10 + row
            first = max(position - window + 1, 0)
            assert seen.tolist() == list(range(first, position + 1))

    def test_tail_of_q(self) -> None:
        """C19: live rows do not depend on what dead ones hold."""
        batch = b0()
        outs = []
        for tail in (0.0, np.nan, np.inf):
            q = batch.q.copy()
            q[batch.num_tokens :] = tail
            outs.append(self.check(batch.replace(q=q)))
        np.testing.assert_array_equal(outs[0], outs[1])
        np.testing.assert_array_equal(outs[0], outs[2])

    @pytest.mark.parametrize("dead", [99, -1, 2**31 - 1])
    def test_dead_slot(self, dead: int) -> None:
        """C03."""
        batch = b0()
        page_indices = batch.page_indices.copy()
        page_indices[1, 1] = dead
        self.check(batch.replace(page_indices=page_indices))

    def test_dead_rows_of_metadata(self) -> None:
        """C11."""
        batch = random_batch(((8, 20), (1, 9)), max_num_seqs=4)
        kv_lens = np.array([20, 9, -5, 9999], np.int32)
        self.check(batch.replace(kv_lens=kv_lens))

    def test_no_sequences(self) -> None:
        """C09."""
        batch = b0().replace(
            num_seqs=np.zeros(1, np.int32), cu_q_lens=np.zeros(3, np.int32)
        )
        assert not self.run(batch).any()

    def test_sequences_without_queries(self) -> None:
        """Rows with q_len 0 between others, first, and last."""
        self.check(
            random_batch(((0, 5), (3, 9), (0, 0), (0, 40), (18, 20), (0, 33)))
        )

    def test_full_buffers(self) -> None:
        """No dead row, no dead slot, no dead page."""
        self.check(
            random_batch(
                ((16, 32), (16, 32)),
                max_num_tokens=32,
                max_num_seqs=2,
                pages_per_seq=2,
                num_dead_pages=0,
            )
        )

    def test_one_token(self) -> None:
        self.check(random_batch(((1, 1),), max_num_tokens=1, max_num_seqs=1))

    def test_many_short_sequences_in_a_block(self) -> None:
        seqs = [(1 + i % 3, 2 + 5 * i) for i in range(24)]
        self.check(random_batch(seqs, dtype=jnp.bfloat16))

    def test_chunks_equal_the_whole(self) -> None:
        """C17: resumed chunks, at the end of a buffer of just their size."""
        whole = random_batch(((24, 24),), max_num_tokens=24)
        expected = self.check(whole)
        for begin, end in ((0, 10), (10, 13), (13, 24)):
            chunk = whole.replace(
                q=whole.q[begin:end],
                kv_lens=np.array([end, 0, 0], np.int32),
                cu_q_lens=np.array([0, *[end - begin] * 3], np.int32),
            )
            np.testing.assert_allclose(
                self.check(chunk), expected[begin:end], atol=1e-5
            )
        self.check(random_batch(((29, 29), (11, 24)), max_num_tokens=40))

    @pytest.mark.parametrize("window", [None, 4])
    def test_very_negative_logits(self, window: int | None) -> None:
        """C26: logits of -1e8 are as good as any other."""
        batch = random_batch(((1, 20),))
        q = np.full_like(batch.q, 448.0)
        kv_pages = batch.kv_pages.copy()
        kv_pages[:, :, 0::2] = -1880.0
        outside = 20 - window if window else 0
        for position in range(outside):
            page = batch.page_indices[0, position // 16]
            kv_pages[page, position % 16, 0::2] = 1880.0
        batch = batch.replace(q=q, kv_pages=kv_pages)
        self.check(batch, sm_scale=1.0, sliding_window=window)

    @pytest.mark.parametrize("row", [(5, 37), (1, 45)], ids=str)
    def test_neighbours_do_not_matter(self, row: tuple[int, int]) -> None:
        """C28: the same bits alone and anywhere in a batch."""
        q_len, _ = row
        sizes: dict[str, Any] = {
            "dtype": jnp.dtype(jnp.bfloat16),
            "max_num_tokens": 64,
            "max_num_seqs": 16,
            "pages_per_seq": 8,
        }
        alone = random_batch((row,), num_dead_pages=45, **sizes)
        expected = self.check(alone)[:q_len]
        decodes = [(1, 20 + i) for i in range(16)]
        mixed = [(1 + i % 4, 20 + i) for i in range(16)]
        for place, others in itertools.product((0, 7, 15), (decodes, mixed)):
            seqs = list(others)
            seqs[place] = row
            batch = random_batch(seqs, seed=place, **sizes)
            q, kv_pages = batch.q.copy(), batch.kv_pages.copy()
            q[batch.rows(place)] = alone.q[:q_len]
            kv_pages[batch.pages(place)] = alone.kv_pages[alone.pages(0)]
            batch = batch.replace(q=q, kv_pages=kv_pages)
            out = self.check(batch)[batch.rows(place)]
            np.testing.assert_array_equal(out, expected)

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    @pytest.mark.parametrize("seq", [0, 1, 2])
    def test_bad_values_stay_in_their_sequence(
        self, seq: int, poison: float
    ) -> None:
        """A sequence whose own numbers are broken breaks no other."""
        batch = random_batch(((3, 20), (4, 30), (2, 9)))
        expected = self.run(batch)
        q, kv_pages = batch.q.copy(), batch.kv_pages.copy()
        q[batch.rows(seq)] = poison
        kv_pages[batch.pages(seq)] = poison
        out = self.run(batch.replace(q=q, kv_pages=kv_pages))
        for other in {0, 1, 2} - {seq}:
            np.testing.assert_array_equal(
                out[batch.rows(other)], expected[batch.rows(other)]
            )

    def test_shared_pages(self) -> None:
        """Two sequences read one prefix."""
        batch = random_batch(((1, 40), (1, 35)))
        page_indices = batch.page_indices.copy()
        page_indices[1, :2] = page_indices[0, :2]
        self.check(batch.replace(page_indices=page_indices))

    @pytest.mark.parametrize("kv_len", [32767, 32768, 32769, 40000])
    def test_far_positions(self, kv_len: int) -> None:
        """C22."""
        batch = random_batch(
            ((1, kv_len), (1, 5)),
            num_q_heads=2,
            num_kv_heads=1,
            page_size=256,
            dtype=jnp.bfloat16,
        )
        self.check(batch, sliding_window=512)

    def test_a_long_context(self) -> None:
        """C22: in float32 a block of 2^17 tokens that is left out shows."""
        batch = random_batch(
            ((1, 2**17), (1, 5)),
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=64,
            page_size=256,
        )
        self.check(batch)

    def test_several_buffer_sizes(self) -> None:
        """C99: each size is a program of its own."""
        for tokens in (16, 64, 32, 48):
            self.check(random_batch(((8, 20), (1, 9)), max_num_tokens=tokens))


# What an implementation that checks its metadata refuses to be asked.


def check_more_queries_than_keys(implementation: Suite) -> None:
    """C07 with checks off: rows without a key are 0, the rest is right."""
    batch = b0()
    kv_lens = np.array([4, 9], np.int32)
    out = implementation.check(batch.replace(kv_lens=kv_lens))
    assert not out[:4].any()
    assert out[4:8].all()


def check_window_cuts_the_work(implementation: Suite) -> None:
    """C93: pages left of the window are not even looked up."""
    batch = random_batch(((1, 1024),), page_size=64, num_kv_heads=1)
    expected = implementation.check(batch, sliding_window=128)
    page_indices = batch.page_indices.copy()
    page_indices[0, : 1024 // 64 - 3] = 10**6
    out = implementation.run(
        batch.replace(page_indices=page_indices), sliding_window=128
    )
    np.testing.assert_array_equal(out, expected)
