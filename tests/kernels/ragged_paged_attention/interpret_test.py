"""The TPU kernel in its interpreter, with races and stray reads caught."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kernels.ragged_paged_attention.tpu import (
    ragged_paged_attention_tpu,
)
from pagemill.kv_cache import KVLayout
from pagemill.params import AttentionParams, Tuning
from pagemill.testing.batches import random_batch

from tests.kernels.ragged_paged_attention import suite

INTERPRET = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


@functools.cache
def _compiled(params: AttentionParams, tuning: Tuning) -> Any:
    return jax.jit(
        functools.partial(
            ragged_paged_attention_tpu,
            params=params,
            tuning=tuning,
            interpret=INTERPRET,
        )
    )


class Interpreted(suite.Harness):
    """The kernels in the interpreter."""

    tuning = Tuning()
    layout = KVLayout.PLANES

    @pytest.fixture(autouse=True)
    def _drop_programs(self) -> Iterator[None]:
        """Hundreds of the interpreter's programs would use up memory maps."""
        yield
        _compiled.cache_clear()
        jax.clear_caches()

    def attend(self, operands: Operands, params: AttentionParams) -> Any:
        outs = _compiled(params, self.tuning)(operands)
        jax.block_until_ready(outs)
        # A private name, the only one there is: renamed, this must fail.
        races: Any = interpret_pallas_call.races
        assert not races.races_found
        return outs


class TestInterpret(Interpreted, suite.Suite):
    def test_more_queries_than_keys(self) -> None:
        suite.check_more_queries_than_keys(self)

    def test_wide_mode(self) -> None:
        with jax.enable_x64(True):
            self.check(random_batch(suite.MIXED), sliding_window=9)

    @pytest.mark.parametrize("pages", [1, 2, 3, 5])
    @pytest.mark.parametrize("queries", [1, 16, 64])
    def test_block_sizes(self, pages: int, queries: int) -> None:
        """Blocks that do and do not divide a row of the table (C03)."""
        self.tuning = Tuning(
            num_kv_pages_per_block=pages, num_queries_per_block=queries
        )
        batch = random_batch(
            ((20, 70), (1, 33), (9, 9)), page_size=16, dtype=jnp.bfloat16
        )
        self.check(batch)
        self.check(batch, sliding_window=18)

    def test_pages_left_of_the_window_are_not_fetched(self) -> None:
        self.tuning = Tuning(num_kv_pages_per_block=1)
        suite.check_window_cuts_the_work(self)

    @pytest.mark.parametrize("page_size", [1, 3, 20])
    @pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
    def test_tiny_page_tables(self, kv_dtype: str, page_size: int) -> None:
        """Blocks whose keys fill no register, nor words of one."""
        rows = ((1, page_size), (2, 2), (1, 1))
        if page_size == 1:
            rows = ((1, 1), (1, 1))
        batch = random_batch(
            rows,
            page_size=page_size,
            dtype=jnp.bfloat16,
            kv_dtype=jnp.dtype(kv_dtype),
        )
        self.check(batch)

    @pytest.mark.parametrize("layout", list(KVLayout))
    def test_streamed_page_table(self, layout: KVLayout) -> None:
        self.layout = layout
        self.tuning = Tuning(num_kv_pages_per_block=3, stream_page_table=True)
        batch = random_batch(suite.MIXED, page_size=8, dtype=jnp.bfloat16)
        self.check(batch)
        self.check(batch, sliding_window=9, soft_cap=2.0)

    @pytest.mark.parametrize("row", [(5, 37), (1, 45)], ids=str)
    @pytest.mark.parametrize("layout", [KVLayout.INTERLEAVED, KVLayout.PACKED])
    def test_neighbours_do_not_matter_in_other_layouts(
        self, layout: KVLayout, row: tuple[int, int]
    ) -> None:
        """C28."""
        self.layout = layout
        self.test_neighbours_do_not_matter(row)

    @pytest.mark.parametrize("layout", [KVLayout.INTERLEAVED, KVLayout.PACKED])
    @pytest.mark.parametrize("dtype", suite.DTYPES)
    @pytest.mark.parametrize(
        ("heads", "head_dim"),
        [((4, 2), 128), ((9, 3), 80), ((4, 4), 256), ((4, 2), 192)],
    )
    def test_layouts(
        self,
        heads: tuple[int, int],
        head_dim: int,
        dtype: str,
        layout: KVLayout,
    ) -> None:
        self.layout = layout
        batch = random_batch(
            suite.MIXED,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            dtype=jnp.dtype(dtype),
        )
        self.check(batch, sliding_window=19)

    @pytest.mark.parametrize("layout", [KVLayout.INTERLEAVED, KVLayout.PACKED])
    @pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize(
        ("heads", "head_dim", "page_size"),
        [((8, 4), 128, 16), ((9, 3), 80, 2), ((7, 1), 192, 1)],
    )
    def test_layouts_of_eight_bits(
        self,
        heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        kv_dtype: str,
        layout: KVLayout,
    ) -> None:
        """C46: rows of a token that do and do not fill words."""
        self.layout = layout
        batch = random_batch(
            suite.MIXED,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            page_size=page_size,
            dtype=jnp.dtype(jnp.bfloat16),
            kv_dtype=jnp.dtype(kv_dtype),
        )
        self.check(batch)

    @pytest.mark.parametrize("layout", [KVLayout.INTERLEAVED, KVLayout.PACKED])
    @pytest.mark.parametrize("heads", [(4, 2), (5, 5)], ids=str)
    def test_layouts_of_integers(
        self, heads: tuple[int, int], layout: KVLayout
    ) -> None:
        """C46: of both signs, and the lowest."""
        self.layout = layout
        batch = random_batch(
            suite.MIXED,
            num_q_heads=heads[0],
            num_kv_heads=heads[1],
            kv_dtype=np.int8,
        )
        batch.kv_pages[batch.pages(0)[0], 0] = -128
        scale = np.full(heads[1], 0.05, np.float32)
        self.check(batch, {"k_scale": scale, "v_scale": scale})
