"""Reads a folder of the compiler's dumps: one Kernel per program in it."""

from __future__ import annotations

import collections
import pathlib
import re

from pagemill.inspect.allocations import read_allocations
from pagemill.inspect.bundles import read_bundles
from pagemill.inspect.counting import Counter
from pagemill.inspect.generations import Generation
from pagemill.inspect.report import Kernel
from pagemill.inspect.utilisation import read_utilisation

# TIME-NAME-PASS-what.txt
_DUMP = re.compile(
    r"\d+-(?P<name>.+?)-\d+-(?P<what>final_bundles|post-delay-converter"
    r"|final_hlo-static-per-bundle-utilization)\.txt"
)
_PROFILE = re.compile(r"(?P<name>.+?)_TPU.*_static_llo_profile\.textproto")
_UTILISATION = "final_hlo-static-per-bundle-utilization"

Files = dict[str, pathlib.Path]


def read_dumps(
    dumps: pathlib.Path, profiles: pathlib.Path, tpu: Generation
) -> tuple[Kernel, ...]:
    """All kernels, in the order in which they were compiled.

    Args:
      dumps: where --xla_jf_dump_to put them.
      profiles: where --xla_jf_dump_static_llo_profile_to put them.
      tpu: what they were compiled for.
    """
    files: dict[str, Files] = collections.defaultdict(dict)
    for path in sorted(dumps.iterdir()):
        found = _DUMP.fullmatch(path.name)
        # The chip's own startup code, and the program around the kernels.
        if found and found["name"] != "TLP" and found["name"][0] != "<":
            files[found["name"]][found["what"]] = path
    for path in profiles.iterdir():
        found = _PROFILE.fullmatch(path.name)
        if found:
            files[found["name"]]["profile"] = path
    return tuple(
        _read(name, of_kernel, tpu)
        for name, of_kernel in files.items()
        if "final_bundles" in of_kernel
    )


def _read(name: str, files: Files, tpu: Generation) -> Kernel:
    bundles = read_bundles(files["final_bundles"])
    utilisation = read_utilisation(files.get(_UTILISATION))
    held = read_allocations(files.get("post-delay-converter"))
    profile = files.get("profile")
    text = profile.read_text("utf-8", "replace") if profile else ""
    counter = Counter(bundles, utilisation, tpu)
    return Kernel(
        name,
        counter.total(),
        counter.loops(),
        vmem_bytes=sum(a.num_bytes for a in held if a.space == "vmem"),
        smem_bytes=sum(a.num_bytes for a in held if a.space == "smem"),
        allocations=held,
        simulated_cycles=_field(text, "estimated_cycles"),
        unknown_scalars=_field(text, "scalar_inputs") or 0,
    )


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"\b{name}: (\d+)", text)
    return int(found[1]) if found else None
