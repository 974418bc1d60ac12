"""`horovod-compat`, installed with the wheel of ronde, without a network or a compiler."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest
from installed import TIMEOUT_S, Installed, run

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = pathlib.Path(__file__).parent.parent.parent
COMPAT = ROOT / "sdk-python" / "horovod-compat"

RANKS = """
import os, horovod
names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME"]
print(horovod.__version__, *(os.environ[name] for name in names))
"""
ABSENT = "import horovod.{0}"


@pytest.fixture(scope="module")
def installed(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with the wheel of ronde and this distribution's, which lies beside it; else its folder."""
    found = Installed(sys.executable, wheel, tmp_path_factory.mktemp("reader") / "environment")
    beside = sorted(wheel.parent.glob("horovod_compat-*-py3-none-any.whl"))
    install = ["python", "-m", "pip", "install", "--disable-pip-version-check", "--no-index"]
    found.output_of(*install, str(beside[0] if beside else COMPAT))
    return found


def test_horovod_compat_is_built_next_to_the_wheel(
    wheel: pathlib.Path, build: Callable[[pathlib.Path, str], pathlib.Path]
) -> None:
    own = build(COMPAT, "build_wheel")
    assert (wheel.parent / own.name).read_bytes() == own.read_bytes()
    # From the folder alone, as checkouts do it.
    with zipfile.ZipFile(own) as archive:
        assert "horovod/torch/__init__.py" in archive.namelist()


def test_jobs_start_as_they_did(installed: Installed) -> None:
    output = installed.output_of("horovodrun", "-np", "2", "-H", "localhost:2", "python", "-c", RANKS)
    lines = [line.partition("<stdout>:")[2] for line in output.splitlines() if "<stdout>:" in line]
    assert sorted(lines) == [f"0.28.1 {rank} 2 {rank} 1 localhost" for rank in range(2)]
    assert installed.output_of("horovodrun", "--version") == "0.28.1\n"
    assert "[ ] TensorFlow" in installed.output_of("horovodrun", "--check-build")
    version = installed.output_of("python", "-c", "import ronde; print(ronde.__version__)").strip()
    assert f"Version: {version}\n" in installed.output_of("python", "-m", "pip", "show", "horovod-compat")


def last_line(installed: Installed, name: str) -> str:
    """How the import of a module of Horovod ends that cannot be imported here."""
    command = [str(installed.bin / "python"), "-c", ABSENT.format(name)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=installed.environment, timeout=TIMEOUT_S, check=False
    )
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("torch", '"torch>=2.1"'),
        ("tensorflow", '"tensorflow>=2.16"'),
        ("tensorflow.keras", '"tensorflow>=2.16"'),
        ("keras", '"keras>=3" "tensorflow>=2.16"'),
        ("ray", '"ray[train]"'),
        ("spark", "pyspark pyarrow"),
        ("mxnet", '"mxnet==1.9.1" "numpy<1.24" "setuptools<70"'),
    ],
)
def test_frameworks_that_are_not_installed_raise_an_error_that_names_the_package(
    installed: Installed, name: str, package: str
) -> None:
    last = last_line(installed, name)
    assert last.startswith("ImportError: ")
    assert "not installed" in last
    assert f": pip install {package} (the extra `" in last
    assert last.endswith("` of ronde's wheel)")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[pathlib.Path, str], pathlib.Path]:
    """Calls a hook of a folder's builder, as pip does, and returns what it made."""

    def call(folder: pathlib.Path, hook: str) -> pathlib.Path:
        out = tmp_path_factory.mktemp("built")
        script = f"import sys; sys.path.insert(0, {str(folder)!r}); import backend; print(backend.{hook}({str(out)!r}))"
        return out / run([sys.executable, "-c", script]).strip()

    return call


def test_the_wheel_is_the_same_from_checkout_and_archive(
    build: Callable[[pathlib.Path, str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    wheel = build(COMPAT, "build_wheel")
    assert build(COMPAT, "build_wheel").read_bytes() == wheel.read_bytes()
    with tarfile.open(build(COMPAT, "build_sdist")) as archive:
        for member in archive.getmembers():
            path = tmp_path / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.extractfile(member).read())
    (unpacked,) = tmp_path.iterdir()
    assert build(unpacked, "build_wheel").read_bytes() == wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        record = next(name for name in archive.namelist() if name.endswith("/RECORD"))
        recorded = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
        assert recorded == set(archive.namelist())
    source = COMPAT / "src"
    assert packed == {str(path.relative_to(source)) for path in source.rglob("*.py")} | {"horovod/py.typed"}
