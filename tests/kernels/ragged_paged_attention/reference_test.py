"""The plain jnp implementation."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kernels.ragged_paged_attention.reference import (
    ragged_paged_attention_xla,
)
from pagemill.kv_cache import KVLayout
from pagemill.params import AttentionParams
from pagemill.testing.batches import random_batch

from tests.kernels.ragged_paged_attention import suite


@functools.cache
def _compiled(params: AttentionParams) -> Any:
    return jax.jit(functools.partial(ragged_paged_attention_xla, params=params))


class TestReference(suite.Suite):
    def attend(self, operands: Operands, params: AttentionParams) -> Any:
        return _compiled(params)(operands)

    def test_more_queries_than_keys(self) -> None:
        suite.check_more_queries_than_keys(self)

    def test_wide_mode(self) -> None:
        with jax.enable_x64(True):
            self.check(random_batch(suite.MIXED), sliding_window=9)

    def test_memory_does_not_grow_with_the_batch(self) -> None:
        """All pages of all sequences at once would take 2 GiB."""
        seqs, pages, heads, head_dim = 64, 512, 2, 128
        shape: Any = jax.ShapeDtypeStruct
        compiled = (
            _compiled(AttentionParams(sm_scale=1.0, num_kv_heads=heads))
            .lower(
                Operands(
                    shape((64, 4, head_dim), jnp.float32),
                    shape((64, 16, 2 * heads, head_dim), jnp.float32),
                    shape((seqs,), jnp.int32),
                    shape((seqs, pages), jnp.int32),
                    shape((seqs + 1,), jnp.int32),
                    shape((1,), jnp.int32),
                )
            )
            .compile()
        )
        assert compiled.memory_analysis().temp_size_in_bytes < 32 * 2**20

    def test_pages_left_of_the_window_are_not_used(self) -> None:
        suite.check_window_cuts_the_work(self)

    def test_one_program_for_all_metadata(self) -> None:
        params = AttentionParams(sm_scale=0.125, num_kv_heads=2)
        run: Any = jax.jit(
            functools.partial(ragged_paged_attention_xla, params=params)
        )
        for seqs in (((8, 20), (1, 9)), ((0, 0),), ((1, 3),)):
            batch = random_batch(
                seqs, max_num_tokens=16, max_num_seqs=3, pages_per_seq=2
            )
            kv_pages = np.zeros((8, 16, 4, 128), np.float32)
            kv_pages[: len(batch.kv_pages)] = batch.kv_pages
            batch = batch.replace(kv_pages=kv_pages)
            run(Operands(*map(jnp.asarray, batch.operands)))
        assert run._cache_size() == 1

    @pytest.mark.parametrize("layout", list(KVLayout)[1:])
    def test_layouts(self, layout: KVLayout) -> None:
        self.layout = layout
        options = {"page_size": 32, "head_dim": 80}
        self.check(random_batch(suite.MIXED, **options))
        self.check(
            random_batch(
                ((8, 20), (1, 9)),
                num_q_heads=9,
                num_kv_heads=3,
                dtype=jnp.dtype(jnp.bfloat16),
                kv_dtype=jnp.dtype(jnp.float8_e4m3fn),
                **options,
            )
        )
