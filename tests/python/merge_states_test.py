"""Attention over parts of the keys, put together."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pagemill
import pytest
from pagemill import SpecError
from pagemill.testing.batches import random_batch

INF = np.inf


def expected(outs: Any, lses: Any) -> tuple[Any, Any]:
    """In float64, without a shift, so for lses of a middling size."""
    weights = np.exp(lses.astype(np.float64))
    total = weights.sum(0)
    outs = np.where(weights[..., None] > 0, outs.astype(np.float64), 0.0)
    out = (outs * weights[..., None]).sum(0)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    return out / np.where(total > 0, total, 1.0)[..., None], lse


def parts(count: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    outs = rng.normal(size=(count, 5, 4, 32)).astype(np.float32)
    return outs, 3 * rng.normal(size=(count, 5, 4)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_float64(count: int, dtype: str) -> None:
    outs, lses = parts(count)
    outs = outs.astype(jnp.dtype(dtype))
    out, lse = jax.jit(pagemill.merge_states)(outs, lses)
    wanted, wanted_lse = expected(outs, lses)
    assert out.dtype == outs.dtype
    assert lse.dtype == jnp.float32
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(
        np.asarray(out).astype(np.float64), wanted, atol=tolerance
    )
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


def test_parts_without_keys() -> None:
    outs, lses = parts(3)
    lses[1], lses[:, 2] = -INF, -INF
    outs[1], outs[:, 2] = np.nan, np.nan
    out, lse = pagemill.merge_states(outs, lses)
    wanted, wanted_lse = expected(outs, lses)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    assert not np.asarray(out[2]).any()
    assert (np.asarray(lse[2]) == -INF).all()


@pytest.mark.parametrize("shift", [-1e8, -300.0, 300.0, 1e8])
def test_large_logits(shift: float) -> None:
    outs, _ = parts(2)
    lses = np.full((2, 5, 4), shift, np.float32)
    out, lse = pagemill.merge_states(outs, lses)
    np.testing.assert_allclose(out, outs.mean(0), atol=1e-5)
    np.testing.assert_allclose(lse, np.float32(shift) + np.log(2), rtol=1e-6)


def test_gradient() -> None:
    """Against differences in float64; and finite beside empty parts."""
    outs, lses = parts(3)

    def loss(outs: Any, lses: Any) -> Any:
        out, lse = pagemill.merge_states(outs, lses)
        return jnp.sum(jnp.sin(out)) + jnp.sum(
            jnp.where(lse > -jnp.inf, lse, 0.0) ** 2
        )

    def loss64(outs: Any, lses: Any) -> float:
        out, lse = expected(outs, lses)
        return float(np.sin(out).sum() + (lse**2).sum())

    found = jax.grad(loss, argnums=(0, 1))(outs, lses)
    wide = [outs.astype(np.float64), lses.astype(np.float64)]
    for which, index in ((0, (1, 2, 3, 4)), (0, (0, 4, 0, 31)), (1, (2, 1, 0))):
        up, down = (
            [x.copy() for x in wide],
            [x.copy() for x in wide],
        )
        up[which][index] += 1e-5
        down[which][index] -= 1e-5
        slope = (loss64(*up) - loss64(*down)) / 2e-5
        np.testing.assert_allclose(found[which][index], slope, rtol=2e-3)
    lses[1], lses[:, 2] = -INF, -INF
    for gradient in jax.grad(loss, argnums=(0, 1))(outs, lses):
        assert np.isfinite(gradient).all()


def test_prefix_and_rest() -> None:
    """A sequence's pages in two calls make what one call makes."""
    batch = random_batch(((1, 48), (1, 40)), max_num_seqs=2, pages_per_seq=3)
    prefix = batch.replace(
        kv_lens=np.array([16, 32], np.int32),
        page_indices=batch.page_indices[:, :2].copy(),
    )
    rest_pages = np.zeros_like(prefix.page_indices)
    rest_pages[0], rest_pages[1, 0] = (
        batch.page_indices[0, 1:],
        batch.page_indices[1, 2],
    )
    rest = batch.replace(
        kv_lens=np.array([32, 8], np.int32), page_indices=rest_pages
    )

    def attend(batch: Any) -> Any:
        q, kv_pages, *metadata = batch.operands
        return pagemill.ragged_paged_attention(
            q, kv_pages, tuple(metadata), causal=False, return_lse=True
        )

    outs, lses = zip(*map(attend, (prefix, rest)), strict=True)
    out, lse = pagemill.merge_states(jnp.stack(outs), jnp.stack(lses))
    whole, whole_lse = attend(batch)
    np.testing.assert_allclose(out, whole, atol=1e-5)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-5)


@pytest.mark.parametrize(
    ("outs", "lses", "words"),
    [
        ((0, 5, 4, 32), (0, 5, 4), "must have a part"),
        ((2, 5, 4, 32), (3, 5, 4), r"lses.shape=\(3, 5, 4\)"),
        ((5, 4, 32), (5, 4), r"outs.shape=\(5, 4, 32\)"),
    ],
)
def test_refusals(outs: Any, lses: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        pagemill.merge_states(
            np.zeros(outs, np.float32), np.zeros(lses, np.float32)
        )
