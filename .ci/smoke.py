"""smoke.py README: runs its first Python example; the wheel is installed.

Run it from a folder other than the checkout, with the environment's Python.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys


def main(readme: str) -> int:
    """Runs the example and compares its output with its last comment."""
    text = pathlib.Path(readme).read_text("utf-8")
    found = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    if found is None:
        print("the README has no Python example")
        return 1
    pathlib.Path("example.py").write_text(found[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr, sep="", end="")
    expected = found[1].rpartition("# ")[2].strip()
    if done.returncode == 0 and done.stdout.strip() == expected:
        return 0
    print(f"exit code {done.returncode}; the README says: {expected}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
