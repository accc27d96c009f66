"""What is known of a compiled kernel, as frozen dataclasses.

All of it is read from the compiler's final schedule, and ``simulated_cycles``
from its simulator: nothing is measured on a TPU.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from pagemill.inspect.errors import InspectError
from pagemill.inspect.generations import Generation


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Memory that a kernel holds: space (vmem, smem), size, shape and use."""

    space: str
    num_bytes: int
    shape: str
    tag: str


@dataclasses.dataclass(frozen=True)
class Counts:
    """What some bundles hold together.

    Attributes:
      bundles: how many; each takes a cycle when nothing stalls.
      empty: those that use no slot: latency that nothing could hide.
      capacity: how many of each slot a bundle has.
      slots: how many are used in all; MATMUL and MATPUSH in cycles.
      matmuls: matmul instructions by type of their LHS.
      mxu_cycles: for how long they occupy all MXUs.
      issued_macs: multiply-accumulates of full MXUs in that time.
      dma_starts: copies started, by opcode.
      dma_waits: waits for copies.
      vector_spills: vector registers stored for want of room.
      vector_fills: and loaded back.
      scalar_spills: scalar registers stored.
      scalar_fills: and loaded back.
      opcodes: instructions by opcode, most frequent first.
    """

    bundles: int
    empty: int
    capacity: Mapping[str, int]
    slots: Mapping[str, int]
    matmuls: Mapping[str, int]
    mxu_cycles: float
    issued_macs: int
    dma_starts: Mapping[str, int]
    dma_waits: int
    vector_spills: int
    vector_fills: int
    scalar_spills: int
    scalar_fills: int
    opcodes: Mapping[str, int]

    @property
    def busy(self) -> dict[str, float]:
        """The fraction of each slot that is used."""
        return {
            name: self.slots[name] / (size * max(self.bundles, 1))
            for name, size in self.capacity.items()
        }

    @property
    def mxu_busy(self) -> float:
        """MXU time over bundles; above 1 the MXU's queue holds issue back."""
        return self.mxu_cycles / max(self.bundles, 1)

    @property
    def cycles(self) -> float:
        """At least so many, once: the larger of bundles and MXU time."""
        return max(self.bundles, self.mxu_cycles)

    @property
    def slot_floor(self) -> int:
        """Bundles if instructions depended on nothing."""
        full = [-(-self.slots[n] // size) for n, size in self.capacity.items()]
        return max([*full, round(self.mxu_cycles)])

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The busiest slot, or "MXU", and how busy it is."""
        whole = {n: use for n, use in self.busy.items() if ":" not in n}
        whole["MXU"] = self.mxu_busy
        # Of equals a slot, which says more than the unit behind it.
        return max(whole.items(), key=lambda item: item[1])


@dataclasses.dataclass(frozen=True)
class Segment:
    """A straight piece of a loop.

    Attributes:
      first: address of its first bundle.
      mark: what the compiler calls it: LB a loop's body, PF and PB predicated
        code, CT the target of a branch; or "".
      counts: what it holds.
    """

    first: int
    mark: str
    counts: Counts


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop of a kernel; the one at index 0 is what lies outside of all.

    Attributes:
      index: place among the kernel's loops.
      parent: index of the loop around it; None for index 0.
      depth: how many loops are around it.
      first: address of its first bundle.
      total_bundles: with those of the loops in it.
      own: what it holds without the loops in it.
      segments: the same in straight pieces.
    """

    index: int
    parent: int | None
    depth: int
    first: int
    total_bundles: int
    own: Counts
    segments: tuple[Segment, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program.

    Attributes:
      name: as the compiler calls it.
      total: what all of it holds.
      loops: outer ones first; they form a tree by ``parent``.
      vmem_bytes: its windows, scratch and spill slots in VMEM.
      smem_bytes: the same in SMEM.
      allocations: what they are, largest first.
      simulated_cycles: of the whole kernel, from the compiler's simulator;
        None without it, see Analysis.simulator_error.
      unknown_scalars: scalars that the simulator had to guess.
    """

    name: str
    total: Counts
    loops: tuple[Loop, ...]
    vmem_bytes: int
    smem_bytes: int
    allocations: tuple[Allocation, ...]
    simulated_cycles: int | None
    unknown_scalars: int

    @property
    def multiplying(self) -> Loop:
        """The loop that gives the MXUs most to do, loops in it left out."""
        return max(self.loops, key=lambda loop: loop.own.mxu_cycles)

    @property
    def hottest(self) -> Loop:
        """The innermost loop with the most bundles of its own."""
        parents = {loop.parent for loop in self.loops}
        leaves = [loop for loop in self.loops if loop.index not in parents]
        return max(leaves, key=lambda loop: loop.own.bundles)


@dataclasses.dataclass(frozen=True)
class Floors:
    """Cycles of one TensorCore that no schedule can go below.

    Attributes:
      hbm_cycles: the bytes given, over the HBM's rate.
      mxu_cycles: the useful multiply-accumulates given, over the MXUs' peak.
    """

    hbm_cycles: float | None = None
    mxu_cycles: float | None = None

    @property
    def binds(self) -> str | None:
        """What keeps a perfect kernel busy: "HBM", "MXU", or not known."""
        known = {"HBM": self.hbm_cycles, "MXU": self.mxu_cycles}
        cycles = {name: value for name, value in known.items() if value}
        return max(cycles, key=lambda name: cycles[name]) if cycles else None


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What became of a program on one TPU generation.

    Attributes:
      tpu: the generation and its rates.
      kernels: all of the program, XLA's own fusions too.
      lower_seconds: tracing and lowering.
      compile_seconds: the compiler, on this machine.
      code_bytes: of the whole executable.
      temp_bytes: HBM that it needs beside arguments and results.
      simulator_error: why ``simulated_cycles`` are None; "" if they are not.
      floors: from the bytes and multiply-accumulates given.
      known: whatever else a spec function said of its program.
    """

    tpu: Generation
    kernels: tuple[Kernel, ...]
    lower_seconds: float
    compile_seconds: float
    code_bytes: int
    temp_bytes: int
    simulator_error: str = ""
    floors: Floors = Floors()
    known: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def kernel(self, pattern: str = "") -> Kernel:
        """The one whose name the regular expression finds.

        Without a pattern the one with the most bundles.

        Raises:
          InspectError: none fits, or several do.
        """
        found = [k for k in self.kernels if re.search(pattern, k.name)]
        if not pattern and found:
            return max(found, key=lambda kernel: kernel.total.bundles)
        if len(found) != 1:
            names = ", ".join(kernel.name for kernel in self.kernels)
            raise InspectError(
                f"pattern={pattern!r} fits {len(found)} kernels; it must fit "
                f"one of: {names}."
            )
        return found[0]

    def mxu_fraction(self, counts: Counts, useful_macs: float) -> float:
        """Of the MXUs' peak, if these bundles did ``useful_macs`` a pass.

        An upper bound: a pass takes at least ``counts.cycles``.
        """
        return useful_macs / self.tpu.macs_per_cycle / counts.cycles

    def mxu_cap(self, counts: Counts, useful_macs: float) -> float:
        """The same if only the MXUs' own time counted.

        Below 1 when operands do not fill their rows and columns.
        """
        if not counts.mxu_cycles:
            return 0.0
        return useful_macs / self.tpu.macs_per_cycle / counts.mxu_cycles

    def table(self, *, segments: bool = False, min_bundles: int = 8) -> str:
        """As text: a line per loop of at least ``min_bundles``."""
        from pagemill.inspect import table  # noqa: PLC0415 (it reads this)

        return table.render(self, segments=segments, min_bundles=min_bundles)

    def __str__(self) -> str:
        return self.table()

    def as_dict(self) -> dict[str, Any]:
        """All of it, and what follows from it, as plain values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.as_dict(), indent=1)
