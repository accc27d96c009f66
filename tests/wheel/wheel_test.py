"""What the built wheel holds, needs and shows (C97)."""

from __future__ import annotations

import base64
import email.message
import hashlib
import pathlib
import re
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from auditwheel.wheel_abi import analyze_wheel_abi
from packaging.requirements import Requirement
from packaging.tags import Tag, parse_tag
from packaging.utils import parse_wheel_filename

_SIZE_LIMIT = 2 << 20

# Of the build machine: Bazel's folders, homes, sandboxes, this checkout.
_MACHINE_PATHS = re.compile(
    rb"/(?:home|root|tmp|work|usr/src|proc/self/cwd)/[\w./-]+|bazel-out|execroot"
)
_LIBRARIES = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "libstdc++.so.6",
}


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    (path,) = pathlib.Path().glob("*.whl")
    return path


@pytest.fixture(scope="module")
def archive(wheel: pathlib.Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def metadata(archive: zipfile.ZipFile) -> email.message.Message:
    return email.message_from_bytes(_info_file(archive, "METADATA"))


@pytest.fixture(scope="module")
def extension(
    archive: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    (name,) = (n for n in archive.namelist() if n.endswith(".so"))
    return pathlib.Path(archive.extract(name, tmp_path_factory.mktemp("wheel")))


def _info_file(archive: zipfile.ZipFile, name: str) -> bytes:
    (path,) = (
        n for n in archive.namelist() if n.endswith(f".dist-info/{name}")
    )
    return archive.read(path)


def _readelf(extension: pathlib.Path, option: str) -> str:
    return subprocess.run(
        ["/usr/bin/env", "readelf", "--wide", option, extension],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_python_tag_is_the_interpreters(wheel: pathlib.Path) -> None:
    tags = parse_wheel_filename(wheel.name)[3]
    minor = sys.version_info.minor
    expected = ("cp311", "cp311") if minor == 11 else ("cp312", "abi3")
    assert {(t.interpreter, t.abi) for t in tags} == {expected}


def test_platform_tag_is_what_the_symbols_need(wheel: pathlib.Path) -> None:
    machine = sysconfig.get_platform().removeprefix("linux-")
    audited = analyze_wheel_abi(
        None,
        None,
        wheel,
        frozenset(),
        disable_isa_ext_check=True,
        allow_graft=False,
    ).overall_policy.name
    assert audited.endswith(machine)
    (tag,) = parse_wheel_filename(wheel.name)[3]
    assert tag.platform == audited


def test_wheel_file_states_the_same_tag(
    wheel: pathlib.Path, archive: zipfile.ZipFile
) -> None:
    stated: set[Tag] = set()
    message = email.message_from_bytes(_info_file(archive, "WHEEL"))
    for text in message.get_all("Tag", []):
        stated |= parse_tag(text)
    assert stated == set(parse_wheel_filename(wheel.name)[3])
    assert message["Root-Is-Purelib"] == "false"


def test_exports_only_the_entry_point(extension: pathlib.Path) -> None:
    exported = [
        fields[7]
        for fields in map(
            str.split, _readelf(extension, "--dyn-syms").splitlines()
        )
        if len(fields) > 7
        and fields[4] in {"GLOBAL", "WEAK"}
        and fields[6] not in {"UND", "Ndx"}
    ]
    assert exported == ["PyInit__core"]


def test_needs_only_system_libraries(extension: pathlib.Path) -> None:
    dynamic = _readelf(extension, "--dynamic")
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    assert needed <= _LIBRARIES
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    assert "TEXTREL" not in dynamic


def test_unresolved_symbols_are_pythons_or_versioned(
    extension: pathlib.Path,
) -> None:
    undefined = [
        fields[7]
        for fields in map(
            str.split, _readelf(extension, "--dyn-syms").splitlines()
        )
        if len(fields) > 7 and fields[6] == "UND" and fields[4] == "GLOBAL"
    ]
    loose = [
        name
        for name in undefined
        if "@" not in name and not name.startswith(("Py", "_Py"))
    ]
    assert not loose
    sources = {
        version.split("_")[0]
        for _, _, version in (n.partition("@") for n in undefined)
        if version
    }
    assert sources <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}


def test_names_no_path_of_the_build_machine(
    archive: zipfile.ZipFile,
) -> None:
    for name in archive.namelist():
        assert not _MACHINE_PATHS.findall(archive.read(name)), name


def test_is_typed_and_complete(archive: zipfile.ZipFile) -> None:
    names = archive.namelist()
    assert len(names) == len(set(names))
    for needed in [
        "pagemill/__init__.py",
        "pagemill/_core.pyi",
        "pagemill/py.typed",
        "pagemill/kernels/ragged_paged_attention/tpu.py",
    ]:
        assert needed in names
    roots = {name.partition("/")[0] for name in names}
    assert {r for r in roots if not r.endswith(".dist-info")} == {"pagemill"}
    assert not [n for n in names if "test" in pathlib.PurePath(n).name]
    assert not [n for n in names if "BUILD" in n or "__pycache__" in n]


def test_size(wheel: pathlib.Path) -> None:
    assert wheel.stat().st_size < _SIZE_LIMIT


def test_is_reproducible(archive: zipfile.ZipFile) -> None:
    assert {e.date_time for e in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    record = _info_file(archive, "RECORD").decode().splitlines()
    listed = [line.partition(",")[0] for line in record]
    assert sorted(listed) == sorted(archive.namelist())


def test_record_hashes_are_right(archive: zipfile.ZipFile) -> None:
    for line in _info_file(archive, "RECORD").decode().splitlines():
        name, digest, size = line.rsplit(",", 2)
        if not digest:
            continue
        data = archive.read(name)
        found = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
        assert digest == "sha256=" + found.rstrip(b"=").decode(), name
        assert int(size) == len(data)


def test_metadata(wheel: pathlib.Path, metadata: email.message.Message) -> None:
    name, version, *_ = parse_wheel_filename(wheel.name)
    assert (metadata["Name"], metadata["Version"]) == (name, str(version))
    assert metadata["License"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11,<3.14"
    assert set(metadata.get_all("Provides-Extra", [])) == {"tpu", "cli"}
    readme = pathlib.Path("README.md").read_text("utf-8")
    assert metadata.get_payload(decode=True).decode("utf-8") == readme


def test_version_is_the_packages(metadata: email.message.Message) -> None:
    import pagemill

    assert metadata["Version"] == pagemill.__version__


def test_requirements(metadata: email.message.Message) -> None:
    requirements = [
        Requirement(text) for text in metadata.get_all("Requires-Dist", [])
    ]

    def names(extra: str) -> set[str]:
        return {
            r.name
            for r in requirements
            if (r.marker is None and not extra)
            or (r.marker and extra and r.marker.evaluate({"extra": extra}))
        }

    assert names("") == {"absl-py", "jax", "jaxlib", "numpy"}
    assert names("tpu") == {"libtpu"}
    assert names("cli") == {"rich", "matplotlib"}
    (jax,) = (r for r in requirements if r.name == "jax")
    assert jax.specifier.contains("0.10.0")
    assert jax.specifier.contains("0.12.0.1")
    assert not jax.specifier.contains("0.13.0")
