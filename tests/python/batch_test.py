"""RaggedBatch as a pytree, and what its constructor refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagemill import PagemillError, RaggedBatch

from tests.python.b0 import i32, metadata


def test_pytree_round_trip() -> None:
    batch = RaggedBatch(**metadata(distribution=i32(0, 0, 2)))
    leaves, tree = jax.tree.flatten(batch)
    assert len(leaves) == 5
    again = jax.tree.unflatten(tree, leaves)
    assert again.page_size == 16
    assert again.slot_mapping is None
    assert again.kv_lens is batch.kv_lens
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]
    ]
    assert names[:2] == [".kv_lens", ".page_indices"]


def test_one_program_for_many_batches() -> None:
    traces = 0

    @jax.jit
    def step(batch: RaggedBatch) -> jax.Array:
        nonlocal traces
        traces += 1
        return batch.kv_lens.sum() + batch.page_size

    for length in range(9, 25):
        batch = RaggedBatch(**metadata(kv_lens=i32(20, length)))
        assert step(batch) == 20 + length + 16
    assert traces == 1


def test_statics_are_static() -> None:
    a = jax.tree.structure(RaggedBatch(**metadata()))
    b = jax.tree.structure(RaggedBatch(**metadata(page_size=32)))
    assert a != b
    assert hash(a) == hash(jax.tree.structure(RaggedBatch(**metadata())))


def test_works_in_tree_map_and_device_put() -> None:
    batch = jax.device_put(RaggedBatch(**metadata()))
    assert isinstance(batch.kv_lens, jax.Array)
    doubled = jax.tree.map(lambda x: x * 2, batch)
    np.testing.assert_array_equal(doubled.kv_lens, [40, 18])


def test_sizes() -> None:
    batch = RaggedBatch(**metadata())
    assert (batch.max_num_seqs, batch.pages_per_seq) == (2, 2)


def test_x64_jax_arrays_are_refused_by_name() -> None:
    with jax.enable_x64(True), pytest.raises(PagemillError, match="kv_lens"):
        RaggedBatch(**metadata(kv_lens=jnp.asarray([20, 9], jnp.int64)))


def test_slot_mapping_length() -> None:
    with pytest.raises(PagemillError, match="slot_mapping"):
        RaggedBatch(**metadata(slot_mapping=np.zeros(15, np.int32)))


def test_is_frozen() -> None:
    batch = RaggedBatch(**metadata())
    with pytest.raises(AttributeError):
        batch.kv_lens = None  # type: ignore[misc]
