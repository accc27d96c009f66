"""The compiler's dumps are read right, on lines written for the purpose."""

from __future__ import annotations

import pathlib

import pytest
from pagemill.inspect import generation
from pagemill.inspect.dumps import read_dumps

# Bundles of two loops in a row, the second with one in it. An empty bundle
# carries no depth, and a comment may hold newlines.
BUNDLES = """\
LH: loop header
     0x1   :  { %1 = sst [smem:[#allocation9_spill]] %s0_s2 }
     0x2   :  { %2 = dma.hbm_to_smem %s0 ;; %3 = vmatmul.mubr.bf16.mxu0 %v1 }
     0x3 LB: > { %4 = vmatmul.f32.mxu0 %v1 ;; %5 = vst [vmem:[#a_spill]] %v2 }
     0x4   : > { %6 = sbr.rel (!%p1) target bundleno = 3 (0x3), region = 4 /* a
   b */ ;; %7 = vmatmul.mubr.bf16.gmra.mxu0 %v3 }
     0x5 LB: > { %8 = sadd.s32 1, %s1_s1 }
     0x6   :  {}
     0x7 LB: >> { %9 = dma.general %s2_s3 ;; %10 = vld [vmem:[#a_spill]] }
     0x8   : >> { %11 = vmatmul.f8e4m3.mxu1 %v3 ;; %12 = dma.done.wait [#s] }
     0x9 PF: > { %13 = sld [smem:[#b_spill]] ;; dma.done.wait [#s], 8 }
     0xa   :  { %14 = shalt.err (0) }
"""
UTILISATION = """\
== CAPACTIY:
MATMUL, MATPUSH, VALU, VLOAD, VLOAD:FILL
    2     2     4     3     3
== UTILIZATION:
0 0 0 0 0
2 1 0 0 0
1 0 4 0 0
1 0 3 0 0
0 0 2 0 0
0 0 0 0 0
0 0 0 3 2
2 0 0 1 0
0 0 0 0 0
0 0 0 0 0
"""
ALLOCATIONS = """\
  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0x4, \
fixed_abs, tag = 'core index']
  #allocation1 [shape = 's32[1]{0}', space=sflag, size = 0x4, offset = 0, \
scoped, tag = 'scoped memory']
  #allocation3 [shape = 'bf16[8]{0}', space=vmem, size = 0x40, offset = 0, \
scoped, tag = 'scratch operand']
  #allocation5 [shape = 's32[1]{0}', space=smem, size = 512, offset = 0, \
scoped, tag = 'scratch operand']
  #allocation6 [shape = 'bf16[9]{0}', space=vmem, size = 0x80, offset = 0, \
scoped, tag = 'input window']

  #allocation7 [shape = 'x', space=vmem, size = 1, scoped, tag = 'past it']
"""
PROFILE = "hlo_op_estimate {\n  estimated_cycles: 1234\n  scalar_inputs: 2\n}\n"


@pytest.fixture
def folders(tmp_path: pathlib.Path):
    for name, text in {
        "dumps/17-made-up.1-71-final_bundles.txt": BUNDLES,
        "dumps/17-made-up.1-69-final_hlo-static-per-bundle-utilization.txt": (
            UTILISATION
        ),
        "dumps/17-made-up.1-68-post-delay-converter.txt": ALLOCATIONS,
        "dumps/17-made-up.1-70-schedule-analysis_final_bundles.txt": "no",
        "dumps/16-<late-finalization>-71-final_bundles.txt": BUNDLES,
        "dumps/16-TLP-73-final_bundles.txt": BUNDLES,
        "profiles/made-up.1_TPU v6 lite_static_llo_profile.textproto": PROFILE,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path / "dumps", tmp_path / "profiles"


def read(folders, tpu="v6e"):
    (kernel,) = read_dumps(*folders, generation(tpu))
    assert kernel.name == "made-up.1"
    return kernel


def test_loops(folders):
    loops = read(folders).loops
    found = [(x.parent, x.depth, x.first, x.total_bundles) for x in loops]
    assert found == [
        (None, 0, 1, 10),
        (0, 1, 3, 2),
        (0, 1, 5, 5),
        (2, 2, 7, 2),
    ]
    assert [loop.own.bundles for loop in loops] == [3, 2, 3, 2]


def test_segments_end_at_marks_targets_and_inner_loops(folders):
    loops = read(folders).loops
    found = [[(s.first, s.mark) for s in loop.segments] for loop in loops]
    assert found == [
        [(1, ""), (10, "")],
        [(3, "LB")],
        [(5, "LB"), (9, "PF")],
        [(7, "LB")],
    ]


def test_counts(folders):
    kernel = read(folders)
    outside, first, second, inner = (loop.own for loop in kernel.loops)
    assert outside.matmuls == {"bf16": 1}
    assert outside.dma_starts == {"hbm_to_smem": 1}
    assert (outside.scalar_spills, outside.scalar_fills) == (1, 0)
    assert first.matmuls == {"f32": 1, "bf16": 1}
    assert (first.vector_spills, first.vector_fills) == (1, 0)
    assert first.opcodes["sbr.rel"] == 1
    assert (second.scalar_fills, second.dma_waits, second.empty) == (1, 1, 2)
    assert inner.matmuls == {"f8e4m3": 1}
    assert (inner.vector_fills, inner.dma_waits) == (1, 1)
    assert inner.dma_starts == {"general": 1}
    assert kernel.total.bundles == 10


@pytest.mark.parametrize(
    ("tpu", "cycles", "macs"),
    [
        # Rows over rows a cycle and MXU: f32 8, bf16 16, 8-bit 32.
        ("v6e", [(8 + 16) / 4, 32 / 4], [(8 + 16) * 256**2, 32 * 256**2]),
        ("7x", [(8 + 16) / 4, 16 / 4], [(8 + 16) * 256**2, 16 * 256**2]),
        ("v5e", [(8 + 16) / 4, 32 / 4], [(8 + 16) * 128**2, 32 * 128**2]),
    ],
)
def test_mxu_time(folders, tpu, cycles, macs):
    loops = read(folders, tpu).loops
    assert [loops[i].own.mxu_cycles for i in (1, 3)] == cycles
    assert [loops[i].own.issued_macs for i in (1, 3)] == macs


def test_slots(folders):
    kernel = read(folders)
    first = kernel.loops[1].own
    assert first.capacity["VALU"] == 4
    assert first.slots == {
        "MATMUL": 2, "MATPUSH": 0, "VALU": 7, "VLOAD": 0, "VLOAD:FILL": 0,
    }  # fmt: skip
    assert first.busy["VALU"] == 7 / 8
    # Two bundles, for which the MXUs need six cycles.
    assert first.bottleneck == ("MXU", 3.0)
    assert first.cycles == first.slot_floor == 6
    assert kernel.loops[2].own.bottleneck == ("VALU", 2 / 12)


def test_rows_that_do_not_fit_say_nothing(folders):
    path = next(folders[0].glob("*utilization.txt"))
    path.write_text(UTILISATION + "0 0 0 0 0\n")
    assert read(folders).total.slots == {}


def test_memory_and_profile(folders):
    kernel = read(folders)
    assert (kernel.vmem_bytes, kernel.smem_bytes) == (0x40 + 0x80, 512)
    assert [a.num_bytes for a in kernel.allocations] == [512, 0x80, 0x40]
    assert kernel.allocations[1].tag == "input window"
    assert (kernel.simulated_cycles, kernel.unknown_scalars) == (1234, 2)


def test_what_is_absent(folders):
    """Neither slots, nor memory, nor a simulation."""
    for path in [*folders[0].iterdir(), *folders[1].iterdir()]:
        if not path.name.endswith("-71-final_bundles.txt"):
            path.unlink()
    kernel = read(folders)
    assert kernel.total.busy == {}
    assert kernel.total.bottleneck == ("MXU", kernel.total.mxu_busy)
    assert kernel.simulated_cycles is None
    assert kernel.vmem_bytes == 0
