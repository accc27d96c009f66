"""A kernel's loops are simulated for the scalars given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.inspect import analyse, simulated_scalars

from tests.inspect import samples


def gather(*args):
    """Makes its kernel while it is traced, as an op does."""
    call, _ = samples.gather()
    return call(*args)


def cycles(values, kernel=""):
    _, args = samples.gather()
    found = analyse(simulated_scalars(gather, values, kernel), args, "v6e")
    return found.kernel("gather").simulated_cycles


def test_trip_counts_are_as_told():
    few, some, many = (cycles([n, lambda i: i]) for n in (8, 16, 48))
    each = (many - some) / 32
    assert each > 100
    assert some - few == pytest.approx(8 * each, rel=0.05)


def test_untold_they_are_what_the_simulator_guesses():
    """An operand of one element reads as 42; None leaves it alone."""
    assert cycles([None, lambda i: i]) == pytest.approx(
        cycles([42, lambda i: i]), rel=0.02
    )


def test_only_kernels_of_that_name():
    told = cycles([8], kernel="^gather$")
    assert cycles([8], kernel="another") > 2 * told


def test_nothing_stays_behind():
    """Neither the wrapper nor what was traced with it, also in jit's caches."""
    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    @jax.jit
    def op(count, x):
        def body(count, x, out):
            out[...] = x[...] + count[0]

        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(1,),
                in_specs=[pl.BlockSpec((8, 128), lambda i, _: (0, 0))],
                out_specs=pl.BlockSpec((8, 128), lambda i, _: (0, 0)),
            ),
            out_shape=shape,
            interpret=True,
        )(count, x)

    count, zeros = jnp.int32([5]), jnp.zeros((8, 128))
    told = simulated_scalars(op, [100])
    np.testing.assert_array_equal(told(count, zeros), 5 + 100 - 42)
    np.testing.assert_array_equal(op(count, zeros), 5)
    np.testing.assert_array_equal(told(count, zeros), 5 + 100 - 42)
    before = pl.pallas_call
    with pytest.raises(TypeError):
        told(count)
    assert pl.pallas_call is before
