"""Compiles one program in a process of its own; see compiler.py.

libtpu reads its flags once, when it is loaded, and its simulator ends the
process when it meets what it does not know.

    python -m pagemill.inspect.child FOLDER

reads FOLDER/request.json, and writes FOLDER/result.json unless the compiler
ended the process.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jaxlib import xla_client

from pagemill.inspect.errors import InspectError
from pagemill.inspect.generations import Generation, generation
from pagemill.inspect.lowering import load_spec, lower


def main(folder: pathlib.Path) -> None:
    """Does what the request says; whatever goes wrong is in the result."""
    request = json.loads((folder / "request.json").read_text("utf-8"))
    result: dict[str, Any] = {}
    try:
        _run(request, folder, result)
    except Exception as error:  # noqa: BLE001 (the parent raises it)
        known = isinstance(error, InspectError)
        name = "" if known else f"{type(error).__name__}: "
        result["error"] = f"{name}{error}"
    (folder / "result.json").write_text(json.dumps(result), "utf-8")


def _run(
    request: dict[str, Any], folder: pathlib.Path, result: dict[str, Any]
) -> None:
    tpu = generation(request["tpu"])
    program = folder / "program.mlir"
    start = time.perf_counter()
    if request["spec"] is not None:
        result["step"] = "load"
        spec = load_spec(request["spec"], request["kwargs"], tpu)
        result["known"] = spec.known
        result["step"] = "lower"
        text = lower(spec.fn, spec.args, tpu, alone=request["alone"])
        program.write_text(text, "utf-8")
        result["lower_seconds"] = time.perf_counter() - start
    result["step"] = "topology"
    device = _device(tpu)
    result["step"] = "compile"
    text = program.read_text("utf-8")
    start = time.perf_counter()
    compiled = _compile(text, device)
    result["compile_seconds"] = time.perf_counter() - start
    memory = compiled.get_compiled_memory_stats()
    result["code_bytes"] = memory.generated_code_size_in_bytes
    result["temp_bytes"] = memory.temp_size_in_bytes


def _device(tpu: Generation) -> Any:
    device: Any = topologies.get_topology_desc(
        platform="tpu", topology_name=tpu.topology
    ).devices[0]
    # Else the program was lowered for something else.
    found = device.device_kind, device.num_cores
    if found != (tpu.device_kind, tpu.device_cores):
        raise RuntimeError(
            f"libtpu calls {tpu.topology} {found}, not "
            f"{(tpu.device_kind, tpu.device_cores)}"
        )
    return device


def _compile(text: str, device: Any) -> Any:
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id]])
    )
    build = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    # Any module knows JAX's dialects.
    some: Any = jax.jit(lambda: 0).lower().compiler_ir()
    return device.client.compile(
        type(some).parse(text, some.context),
        executable_devices=xla_client.DeviceList((device,)),
        compile_options=options,
    )


def _end_with_parent() -> None:
    """Ends the process when its standard input does: when its parent ends."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(pathlib.Path(sys.argv[1]))
