"""The native CPU implementation, through the public op."""

from __future__ import annotations

from typing import Any

import jax
import pagemill
from pagemill.params import AttentionParams
from pagemill.testing.batches import random_batch

from tests.kernels.ragged_paged_attention import suite


class TestCpu(suite.Suite):
    def attend(self, *operands: Any, params: AttentionParams) -> Any:
        q, kv_pages, *metadata = operands
        return pagemill.ragged_paged_attention(
            q,
            kv_pages,
            tuple(metadata),
            sm_scale=params.sm_scale,
            causal=params.causal,
            sliding_window=params.sliding_window,
            soft_cap=params.soft_cap,
            implementation="cpu",
        )

    def test_wide_mode(self) -> None:
        with jax.enable_x64(True):
            self.check(random_batch(suite.MIXED), sliding_window=9)
