"""What `import pagemill` needs and loads (C94)."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

_HEAVY = ("matplotlib", "rich", "libtpu", "scipy", "pytest", "hypothesis")


def run(code: str, cwd: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loads_nothing_heavy_beyond_jax(tmp_path: pathlib.Path) -> None:
    loaded = run(
        "import sys, jax, jax.experimental.pallas.tpu\n"
        "before = set(sys.modules)\n"
        "import pagemill\n"
        "print(*sorted(set(sys.modules) - before))",
        tmp_path,
    ).split()
    assert "pagemill._core" in loaded
    roots = {name.partition(".")[0] for name in loaded}
    assert not roots & set(_HEAVY)
    leaves = ("pagemill.testing", "pagemill.compat", "pagemill.inspect")
    assert not [n for n in loaded if n.startswith(leaves)]


def test_from_any_directory_without_libtpu(tmp_path: pathlib.Path) -> None:
    out = run(
        "import sys; sys.modules['libtpu'] = None\n"
        "import numpy as np, pagemill\n"
        "pool = pagemill.PagePool(8, 16)\n"
        "planner = pagemill.Planner(pool, 16, 2, 2)\n"
        "batch = planner.plan([(pool.open(), 5)])\n"
        "pagemill.validate(batch)\n"
        "q = np.ones((16, 2, 8), 'f4'); kv = np.ones((8, 16, 2, 8), 'f4')\n"
        "print(pagemill.ragged_paged_attention(q, kv, batch).sum())",
        tmp_path,
    )
    assert float(out) == pytest.approx(5 * 2 * 8)


def test_public_names() -> None:
    import pagemill

    for name in [
        "PagePool",
        "Planner",
        "RaggedBatch",
        "validate",
        "checked",
        "raise_for_code",
        "ragged_paged_attention",
        "update_kv_pages",
        "copy_pages",
        "merge_states",
        "PagemillError",
        "SpecError",
        "CapacityError",
        "UnsupportedError",
        "CheckCode",
        "Tuning",
        "Sequence",
        "as_flat",
        "as_indptr",
        "as_ragged",
        "from_flat",
        "from_indptr",
        "from_ragged",
        "propose_buckets",
        "split_by_budget",
        "trace_step_sizes",
        "ShardedBatch",
        "ShardedPlanner",
        "work_list",
        "inspect",
        "__version__",
    ]:
        assert getattr(pagemill, name) is not None, name


def test_tpu_call_without_a_tpu_says_so(tmp_path: pathlib.Path) -> None:
    out = run(
        "import numpy as np, pagemill\n"
        "q = np.ones((16, 2, 128), 'f4'); kv = np.ones((8, 16, 2, 128), 'f4')\n"
        "batch = ([5], [[0]], [0, 5], [1])\n"
        "try:\n"
        "    pagemill.ragged_paged_attention(q, kv, batch,"
        " implementation='tpu')\n"
        "except pagemill.UnsupportedError as error: print(error)",
        tmp_path,
    )
    assert "needs a TPU" in out
