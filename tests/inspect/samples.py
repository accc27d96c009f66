"""Small kernels of which everything is known."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SIZE = 512
TRIPS = 4


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmuls(contracted: int = SIZE) -> tuple[Any, ...]:
    """A loop of TRIPS products [SIZE, contracted] @ [contracted, SIZE]."""

    def body(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.zeros_like(out)

        def step(i: Any, carry: Any) -> Any:
            out[...] += lax.dot_general(
                a[i], b[...], (((1,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            return carry

        lax.fori_loop(0, TRIPS, step, jnp.int32(0))

    call = pl.pallas_call(
        body,
        out_shape=shaped(SIZE, SIZE, dtype=jnp.float32),
        name="matmuls",
    )
    args = shaped(TRIPS, SIZE, contracted), shaped(contracted, SIZE)
    return call, args, {"useful_macs": TRIPS * SIZE * contracted * SIZE}


def gather(rows: int = 64) -> tuple[Any, ...]:
    """Copies count[0] rows, named by an index, through VMEM one by one."""

    def body(
        count: Any, index: Any, source: Any, out: Any, row: Any, done: Any
    ) -> None:
        def step(i: Any, carry: Any) -> Any:
            came = pltpu.make_async_copy(source.at[index[i]], row, done)
            came.start()
            came.wait()
            out[pl.ds(pl.multiple_of(i * 8, 8), 8), :] = row[...]
            return carry

        lax.fori_loop(jnp.int32(0), count[0], step, jnp.int32(0))

    call = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((rows * 8, 128), lambda i, *_: (i, 0)),
            scratch_shapes=[
                pltpu.VMEM((8, 128), jnp.float32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=shaped(rows * 8, 128, dtype=jnp.float32),
        name="gather",
    )
    args = (
        shaped(1, dtype=jnp.int32),
        shaped(rows, dtype=jnp.int32),
        shaped(rows, 8, 128, dtype=jnp.float32),
    )
    return call, args


def triple() -> tuple[Any, ...]:
    """Packed 16-bit arithmetic with a constant: the simulator aborts."""

    def body(x: Any, out: Any) -> None:
        out[...] = x[...] * jnp.bfloat16(3)

    call = pl.pallas_call(body, out_shape=shaped(16, 128), name="triple")
    return call, (shaped(16, 128),)


def too_large() -> tuple[Any, ...]:
    """Scratch of 256 MiB."""

    def body(x: Any, out: Any, scratch: Any) -> None:
        scratch[...] = jnp.zeros_like(scratch)
        out[...] = x[...] + scratch[:8]

    block = shaped(8, 128, dtype=jnp.float32)
    call = pl.pallas_call(
        body,
        out_shape=block,
        scratch_shapes=[pltpu.VMEM((2**19, 128), jnp.float32)],
        name="too_large",
    )
    return call, (block,)


def unsupported() -> tuple[Any, ...]:
    """A primitive that Pallas does not lower for TPUs."""

    def body(x: Any, out: Any) -> None:
        out[...] = jnp.cumprod(x[...], axis=0)

    block = shaped(8, 128, dtype=jnp.float32)
    return pl.pallas_call(body, out_shape=block, name="cumprod"), (block,)


def spec_of(name: str) -> str:
    """The sample's place, as analyse takes it."""
    return f"{__name__}:{name}"
