"""Two host devices, or as many as a target asks for, before jax starts."""

import os

_FLAG = "--xla_force_host_platform_device_count"
_flags = os.environ.get("XLA_FLAGS", "")
if _FLAG not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} {_FLAG}=2"
