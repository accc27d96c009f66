"""The native CPU implementation, through the public op."""

from __future__ import annotations

from typing import Any

import jax
import pagemill
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kv_cache import KVLayout
from pagemill.params import AttentionParams
from pagemill.testing.batches import random_batch

from tests.kernels.ragged_paged_attention import suite


class TestCpu(suite.Suite):
    def attend(self, operands: Operands, params: AttentionParams) -> Any:
        return pagemill.ragged_paged_attention(
            operands.q,
            operands.kv_pages,
            operands[2:6],
            sinks=operands.sinks,
            k_scale=operands.k_scale,
            v_scale=operands.v_scale,
            tree_mask=operands.tree_mask,
            **vars(params),
            implementation="cpu",
        )

    def test_wide_mode(self) -> None:
        with jax.enable_x64(True):
            self.check(random_batch(suite.MIXED), sliding_window=9)


class TestCpuPlanes(TestCpu):
    layout = KVLayout.PLANES


class TestCpuPacked(TestCpu):
    layout = KVLayout.PACKED
