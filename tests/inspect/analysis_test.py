"""What a compiled kernel's figures say, against what is known of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pagemill
import pytest
from pagemill.inspect import GENERATIONS, analyse

from tests.inspect import samples
from tests.inspect.samples import SIZE, TRIPS


@pytest.fixture(scope="module")
def matmuls():
    fn, args, known = samples.matmuls()
    return analyse(fn, args, "v6e", **known)


@pytest.fixture(scope="module")
def gather():
    return analyse(*samples.gather(), "v6e")


def test_loops_form_a_tree(matmuls):
    kernel = matmuls.kernel("matmuls")
    outside, loop = kernel.loops
    assert (outside.parent, outside.depth) == (None, 0)
    assert (loop.parent, loop.depth) == (0, 1)
    assert loop.total_bundles == loop.own.bundles
    assert outside.own.bundles + loop.own.bundles == kernel.total.bundles
    assert outside.total_bundles == kernel.total.bundles
    assert kernel.hottest is loop
    for one in kernel.loops:
        pieces = sum(piece.counts.bundles for piece in one.segments)
        assert pieces == one.own.bundles


def test_all_work_of_the_mxu_is_seen(matmuls):
    """Also its fraction of peak: 512 fills 256 rows and columns."""
    kernel = matmuls.kernel()
    loop = kernel.hottest.own
    macs = SIZE**3
    assert loop.issued_macs == macs
    assert loop.mxu_cycles == macs / matmuls.tpu.macs_per_cycle
    assert loop.slots["MATMUL"] > 0
    assert kernel.loops[0].own.issued_macs == 0
    assert matmuls.mxu_cap(loop, macs) == 1
    fraction = matmuls.mxu_fraction(loop, macs)
    assert fraction == loop.mxu_cycles / loop.cycles
    assert 0.5 < fraction <= 1
    assert matmuls.floors.mxu_cycles == TRIPS * loop.mxu_cycles
    assert matmuls.floors.binds == "MXU"


def test_half_of_a_wide_mxu_stays_empty():
    fn, args, known = samples.matmuls(contracted=128)
    found = analyse(fn, args, "v6e", simulate=False, **known)
    loop = found.kernel().hottest.own
    assert found.mxu_cap(loop, SIZE * 128 * SIZE) == 0.5


def test_simulated_cycles_hold_all_passes(matmuls):
    kernel = matmuls.kernel()
    least = TRIPS * kernel.hottest.own.cycles
    assert least < kernel.simulated_cycles < 2 * least + 5000
    assert matmuls.simulator_error == ""


def test_memory(matmuls, gather):
    """Operands of a kernel without a grid lie in VMEM whole."""
    num_bytes = 2 * (TRIPS * SIZE**2 + SIZE**2) + 4 * SIZE**2
    assert matmuls.kernel().vmem_bytes >= num_bytes
    held = {a.tag: a for a in gather.kernel().allocations}
    assert held["scratch operand"].num_bytes == 4 * 8 * 128
    assert held["scratch operand"].space == "vmem"
    assert gather.kernel().smem_bytes > 0
    assert gather.code_bytes > 0


def test_copies_and_waits(gather):
    loop = gather.kernel().hottest.own
    assert sum(loop.dma_starts.values()) == 1
    assert loop.dma_waits == 1
    assert loop.matmuls == {}


@pytest.mark.parametrize("tpu", GENERATIONS)
def test_every_generation(tpu):
    fn, args, known = samples.matmuls()
    found = analyse(fn, args, tpu, simulate=False, **known)
    loop = found.kernel().hottest.own
    assert found.tpu.name == tpu
    assert loop.issued_macs == SIZE**3
    assert found.simulator_error == "not asked for"
    assert found.kernel().simulated_cycles is None


def test_a_spec_is_the_same_as_its_function(matmuls):
    """Its figures are the same, lowered here or in the child process."""
    found = analyse(samples.spec_of("matmuls"), tpu="v6e")
    assert found.kernels == matmuls.kernels
    assert found.floors == matmuls.floors


def test_a_spec_in_a_file(tmp_path: pathlib.Path):
    file = tmp_path / "made_here.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "from jax.experimental import pallas as pl\n"
        "def spec(rows):\n"
        "    block = jax.ShapeDtypeStruct((rows, 128), jnp.float32)\n"
        "    def body(x, out): out[...] = x[...] + 1\n"
        "    return pl.pallas_call(body, out_shape=block, name='one'), "
        "[block]\n"
    )
    found = analyse(f"{file}:spec", tpu="v5e", kwargs={"rows": 16})
    assert found.kernel("one").vmem_bytes >= 2 * 16 * 128 * 4


def test_what_a_function_closes_over(matmuls):
    """A lambda over a jitted one, arrays instead of shapes, an option."""
    call, shapes, _ = samples.matmuls()
    jitted = jax.jit(
        lambda a, b, *, scale: call(a, b) * scale, static_argnames="scale"
    )
    args = [np.zeros(s.shape, s.dtype) for s in shapes]
    found = analyse(lambda a, b: jitted(a, b, scale=2.0), args, "v6e")
    loop = found.kernel("matmuls").hottest.own
    assert loop.matmuls == matmuls.kernel().hottest.own.matmuls


def test_kernels_alone():
    """Each of them, wherever it is called; nothing else is compiled."""
    call, args, _ = samples.matmuls()
    other, other_args = samples.gather()

    @jax.jit
    def program(a, b, *rest):
        def step(x, _):
            return x + call(a, b * 2), ()

        first, _ = jax.lax.scan(step, jnp.zeros((SIZE, SIZE)), length=2)
        return jnp.sort(first), other(*rest)

    found = analyse(program, (*args, *other_args), "v6e", alone=True)
    assert sorted(k.name.split(".")[0] for k in found.kernels) == [
        "gather",
        "matmuls",
    ]
    assert found.kernel("matmuls").hottest.own.issued_macs == SIZE**3
    assert found.kernel("gather").simulated_cycles is not None


def test_x64_mode():
    with jax.enable_x64(True):
        call, args, _ = samples.matmuls()
        wide = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float64)
        found = analyse(
            lambda a, b, c: call(a, b) + c.astype(jnp.float32),
            (*args, wide),
            simulate=False,
        )
    assert found.kernel("matmuls").hottest.own.issued_macs == SIZE**3


def test_hbm_floor():
    call, args, _ = samples.matmuls()
    found = analyse(call, args, "v5p", simulate=False, hbm_bytes=790_000)
    assert found.floors.hbm_cycles == pytest.approx(1000, rel=1e-3)
    assert found.floors.mxu_cycles is None
    assert found.floors.binds == "HBM"


def test_table_and_json(matmuls):
    text = str(matmuls)
    loop = matmuls.kernel().hottest.own
    assert f"matmuls.1: {matmuls.kernel().total.bundles} bundles" in text
    row = next(line for line in text.splitlines() if "loop 1" in line)
    assert str(loop.bundles) in row.split()
    assert len(matmuls.table(segments=True)) > len(text)
    values = json.loads(matmuls.to_json())
    assert values["kernels"][0]["total"]["bundles"] == (
        matmuls.kernels[0].total.bundles
    )
    assert values["tpu"]["name"] == "v6e"


def test_dumps_can_be_kept(tmp_path: pathlib.Path):
    analyse(*samples.gather(), "v6e", simulate=False, keep=tmp_path)
    assert list((tmp_path / "dumps").glob("*gather*final_bundles.txt"))


def test_frozen(matmuls):
    with pytest.raises(dataclasses.FrozenInstanceError):
        matmuls.code_bytes = 1


def test_found_as_an_attribute_of_the_package():
    assert pagemill.inspect.analyse is analyse
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pagemill.no_such_name
