"""make_wheel.py MANIFEST WHEEL: a reproducible wheel from a list of files."""

from __future__ import annotations

import base64
import hashlib
import json
import pathlib
import sys
import zipfile

_EPOCH = (1980, 1, 1, 0, 0, 0)


class Wheel:
    """A wheel being written, and its RECORD."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._record: list[str] = []

    def add(self, path: str, data: bytes) -> None:
        """Stores a file and records its hash."""
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
        digest_text = digest.rstrip(b"=").decode()
        self._record.append(f"{path},sha256={digest_text},{len(data)}")
        self._write(path, data)

    def finish(self, info: str) -> None:
        """Stores RECORD, which lists itself without a hash."""
        path = f"{info}/RECORD"
        text = "\n".join([*self._record, f"{path},,"]) + "\n"
        self._write(path, text.encode())

    def _write(self, path: str, data: bytes) -> None:
        entry = zipfile.ZipInfo(path, _EPOCH)
        mode = 0o755 if path.endswith(".so") else 0o644
        entry.external_attr = (0o100000 | mode) << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        self._archive.writestr(entry, data)


def main(manifest_path: str, wheel_path: str) -> None:
    """Writes the wheel that the manifest describes."""
    manifest = json.loads(pathlib.Path(manifest_path).read_text("utf-8"))
    info = f"{manifest['name']}-{manifest['version']}.dist-info"
    description = pathlib.Path(manifest["description"]).read_text("utf-8")
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {manifest['name']}",
        f"Version: {manifest['version']}",
        *manifest["metadata"],
        "Description-Content-Type: text/markdown",
        "",
        description,
    ]
    tags = [
        "Wheel-Version: 1.0",
        "Generator: pagemill",
        "Root-Is-Purelib: false",
        f"Tag: {manifest['tag']}",
    ]
    with zipfile.ZipFile(wheel_path, "w") as archive:
        wheel = Wheel(archive)
        for path, source in sorted(manifest["files"]):
            wheel.add(path, pathlib.Path(source).read_bytes())
        licence = pathlib.Path(manifest["license"]).read_bytes()
        wheel.add(f"{info}/LICENSE", licence)
        wheel.add(f"{info}/METADATA", "\n".join(metadata).encode())
        wheel.add(f"{info}/WHEEL", ("\n".join(tags) + "\n").encode())
        wheel.finish(info)


if __name__ == "__main__":
    main(*sys.argv[1:])
