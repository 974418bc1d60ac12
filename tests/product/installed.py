"""Environments with the wheel, made as a user makes them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
ENVIRONMENT = ROOT / "tests" / "setup" / "environment.py"
PACKING = ROOT / "sdk-python" / "packing" / "wheel.py"
# Nothing here takes longer than some seconds, but for numpy's first download.
TIMEOUT_S = 300


class Installed:
    """An environment with the wheel in it, and nothing but the environment on PATH."""

    def __init__(self, python: str, wheel: pathlib.Path, folder: pathlib.Path) -> None:
        # Variables of pytest's environment would reveal where that one is.
        run([python, "-m", "venv", str(folder)], {"PATH": os.environ["PATH"]})
        self.bin = folder / "bin"
        self.environment = {"PATH": str(self.bin), "HOME": str(folder), "LC_ALL": "C.UTF-8", "TMPDIR": "/tmp"}
        python = str(self.bin / "python")
        provide_numpy(python)
        pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-index"]
        run([*pip, "--find-links", str(wheelhouse()), str(wheel)], self.environment)

    def output_of(self, *command: str) -> str:
        """The output of a command of the environment."""
        return run([str(self.bin / command[0]), *command[1:]], self.environment)


def pack_development_wheel(folder: pathlib.Path) -> pathlib.Path:
    """Packs what `make build` has built, into a wheel in this folder. Returns its path."""
    run([sys.executable, str(ENVIRONMENT), "packaging"])
    python = run([sys.executable, str(ENVIRONMENT), "path", "packaging"]).strip()
    target = str(pathlib.Path(os.environ["RONDE_BIN"]).parent.parent)
    run([python, str(PACKING), "--dev", "--out", str(folder)], {**os.environ, "CARGO_TARGET_DIR": target})
    (path,) = folder.glob("ronde-*.whl")
    return path


def provide_numpy(python: str) -> None:
    """Downloads the wheel of numpy for a Python, unless it exists."""
    version = run([python, "-c", "import sys; print('{}{}'.format(*sys.version_info))"]).strip()
    if not any(wheelhouse().glob(f"numpy-*-cp{version}-*.whl")):
        download = ["download", "--only-binary", ":all:", "--dest", str(wheelhouse()), "numpy>=1.23"]
        run([python, "-m", "pip", *download])


def wheelhouse() -> pathlib.Path:
    """Where the wheels of numpy are kept, so that the second run needs no network."""
    cache = pathlib.Path(os.environ.get("RONDE_CACHE") or pathlib.Path.home() / ".cache" / "ronde") / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd="/"
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
