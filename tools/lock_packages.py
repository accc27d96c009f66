"""Locks third_party/python/*.in by hash, for each supported Python given.

    python tools/lock_packages.py /path/to/python3.11 /path/to/python3.12 ...

pip resolves them; the locks are for Linux on this machine's architecture.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

_FOLDER = pathlib.Path(__file__).resolve().parent.parent / "third_party/python"


def lock(python: str, requirements: pathlib.Path) -> None:
    """Writes NAME_VERSION.lock beside NAME.in."""
    report = json.loads(
        _run(
            python,
            "-I",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--only-binary=:all:",
            "--report=-",
            f"--requirement={requirements}",
        )
    )
    version = _run(
        python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"
    ).strip()
    lines = sorted(
        f"{item['metadata']['name'].lower()}=={item['metadata']['version']} "
        "--hash=sha256:"
        f"{item['download_info']['archive_info']['hashes']['sha256']}"
        for item in report["install"]
    )
    target = _FOLDER / f"{requirements.stem}_{version}.lock"
    header = f"# {requirements.name} for Python {version}; do not edit.\n"
    target.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{target.name}: {len(lines)} packages")


def _run(*command: str) -> str:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    for interpreter in sys.argv[1:]:
        for file in sorted(_FOLDER.glob("*.in")):
            lock(interpreter, file)
