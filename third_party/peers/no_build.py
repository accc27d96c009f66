"""A build backend that builds nothing, so that pip hands over a source archive.

pip asks a source archive for its metadata before it saves it, which would
install torch and compilers first. The archive holds that metadata already.
"""

from __future__ import annotations

import email
import pathlib
import shutil


def prepare_metadata_for_build_wheel(
    metadata_directory: str,
    config_settings: object = None,  # noqa: ARG001 (pip's signature)
) -> str:
    """Copies the archive's own metadata; pip runs this in the archive."""
    info = email.message_from_string(
        pathlib.Path("PKG-INFO").read_text("utf-8")
    )
    name = f"{info['Name'].replace('-', '_')}-{info['Version']}.dist-info"
    folder = pathlib.Path(metadata_directory, name)
    folder.mkdir()
    shutil.copy("PKG-INFO", folder / "METADATA")
    return name
