"""What the compiler makes of a Pallas kernel, without a TPU.

    import pagemill.inspect

    found = pagemill.inspect.analyse(fn, (q, k, v), tpu="v6e")
    print(found)
    found.kernel().simulated_cycles

libtpu compiles ahead of time for any TPU generation; this package has it write
down its final schedule and reads that: bundles, slots, spills, copies, memory,
and the cycles of libtpu's own simulator. Nothing is measured on a TPU.
"""

from pagemill.inspect.analysis import analyse as analyse
from pagemill.inspect.errors import CompileError as CompileError
from pagemill.inspect.errors import CompileTimeoutError as CompileTimeoutError
from pagemill.inspect.errors import InspectError as InspectError
from pagemill.inspect.errors import LibtpuMissingError as LibtpuMissingError
from pagemill.inspect.errors import OutOfVmemError as OutOfVmemError
from pagemill.inspect.errors import UnknownTpuError as UnknownTpuError
from pagemill.inspect.generations import GENERATIONS as GENERATIONS
from pagemill.inspect.generations import Generation as Generation
from pagemill.inspect.generations import generation as generation
from pagemill.inspect.report import Allocation as Allocation
from pagemill.inspect.report import Analysis as Analysis
from pagemill.inspect.report import Counts as Counts
from pagemill.inspect.report import Floors as Floors
from pagemill.inspect.report import Kernel as Kernel
from pagemill.inspect.report import Loop as Loop
from pagemill.inspect.report import Segment as Segment
from pagemill.inspect.scalars import simulated_scalars as simulated_scalars
