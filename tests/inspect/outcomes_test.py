"""What can go wrong has a type and says what to do."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from pagemill import PagemillError
from pagemill.inspect import (
    CompileError,
    CompileTimeoutError,
    InspectError,
    LibtpuMissingError,
    OutOfVmemError,
    UnknownTpuError,
    analyse,
)

from tests.inspect import samples


def test_unknown_generation():
    with pytest.raises(UnknownTpuError, match=r"'v9'.*v4, v5e, v5p, v6e, 7x"):
        analyse(*samples.gather(), "v9")


def test_without_libtpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(
        LibtpuMissingError, match=r"pip install 'pagemill\[tpu\]'"
    ):
        analyse(*samples.gather(), "v6e")


def test_out_of_vmem():
    with pytest.raises(OutOfVmemError, match="more VMEM") as caught:
        analyse(*samples.too_large(), "v6e")
    assert caught.value.needed == 2**28
    assert caught.value.limit == 2**27


def test_out_of_hbm_is_not_out_of_vmem():
    shape = jax.ShapeDtypeStruct((2**34,), jnp.float32)
    with pytest.raises(CompileError, match="HBM") as caught:
        analyse(lambda x: x + 1, (shape,), "v5e")
    assert not isinstance(caught.value, OutOfVmemError)


def test_the_simulator_aborts():
    """The schedule is there all the same."""
    found = analyse(*samples.triple(), "v6e")
    kernel = found.kernel("triple")
    assert kernel.simulated_cycles is None
    assert found.simulator_error.startswith("SIGABRT: ")
    assert "vmul.bf16" in found.simulator_error
    assert kernel.total.bundles > 0
    assert "not simulated: SIGABRT" in str(found)


def test_a_generation_without_simulator():
    found = analyse(*samples.gather(), "v4")
    assert found.kernel().simulated_cycles is None
    assert "does not know this generation" in found.simulator_error
    assert found.kernel().total.bundles > 0


def test_does_not_lower():
    """Here, and in the child process."""
    with pytest.raises(CompileError, match="cumprod") as caught:
        analyse(*samples.unsupported(), "v6e")
    assert isinstance(caught.value.__cause__, NotImplementedError)
    with pytest.raises(CompileError, match=r"(?s)'lower' failed.*cumprod"):
        analyse(samples.spec_of("unsupported"), tpu="v6e")


def test_no_kernel_to_compile_alone():
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(CompileError, match="holds no Pallas kernel"):
        analyse(lambda x: x + 1, (shape,), alone=True)


def test_no_such_spec():
    with pytest.raises(CompileError, match=r"'load' failed.*no_such_function"):
        analyse(samples.spec_of("no_such_function"))


def test_takes_too_long():
    with pytest.raises(CompileTimeoutError, match=r"timeout=0.05 s"):
        analyse(*samples.gather(), "v6e", timeout=0.05)


def test_a_child_ends_with_its_parent(tmp_path):
    """When its standard input does; nothing is left to compile on."""
    request = {
        "tpu": "v6e",
        "spec": samples.spec_of("matmuls"),
        "kwargs": {},
        "alone": False,
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, "-m", "pagemill.inspect.child", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert not (tmp_path / "result.json").exists()


def test_the_simulator_writes_no_logs_of_its_own(tmp_path, monkeypatch):
    """They can fill a disk: a loop of unknown copies is a line each."""
    monkeypatch.setenv("TPU_LOG_DIR", str(tmp_path))
    analyse(*samples.gather(), "v6e")
    assert not list(tmp_path.iterdir())


def test_which_kernel():
    found = analyse(*samples.gather(), "v6e", simulate=False)
    with pytest.raises(InspectError, match=r"fits 0 kernels.*gather"):
        found.kernel("no such kernel")


def test_all_are_pagemill_errors_and_travel():
    for kind in (
        CompileError,
        CompileTimeoutError,
        InspectError,
        LibtpuMissingError,
        OutOfVmemError,
        UnknownTpuError,
    ):
        error = pickle.loads(pickle.dumps(kind("why")))
        assert type(error) is kind
        assert isinstance(error, PagemillError)
        assert str(error) == "why"
