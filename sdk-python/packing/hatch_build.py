"""Puts what cargo builds into the wheel: the extension module, the command `ronde` as a script of the environment, and
the shipped plugins where the command finds them: `share/ronde/plugins` beside the folder `bin`.

The wheel has two compiled artefacts of one workspace, a library and a program. Wheel builders for Rust support only one
of them, so cargo builds both at once, with the same features, and this hook only places them. pip installs the program
as a script in the environment's `bin` folder: the command runs without Python.

`wheel.py` passes the artefacts in environment variables. Without it (`pip install ./sdk-python`) cargo and
`make plugins` build them here. The build fails if a plugin is missing.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The artefacts; without both, cargo builds them.
BINARY_VARIABLE = "RONDE_WHEEL_BINARY"
EXTENSION_VARIABLE = "RONDE_WHEEL_EXTENSION"
# The folder of the plugins; default: that of `make plugins`.
PLUGINS_VARIABLE = "RONDE_WHEEL_PLUGINS"
# The platform part of the wheel's tag; default: this machine's.
PLATFORM_VARIABLE = "RONDE_WHEEL_PLATFORM"
# The licences of compiled-in crates; a wheel that is not distributed needs none.
NOTICES_VARIABLE = "RONDE_WHEEL_NOTICES"
# The extension uses the stable ABI of this Python and every later one (sdk-python/Cargo.toml).
PYTHON_TAG = "cp39-abi3"


class Artefacts(BuildHookInterface):  # type: ignore[type-arg]
    """The hook; hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Sets the wheel's files and its tag."""
        if version == "editable":
            return
        binary, extension = given() or self.built()
        platform = os.environ.get(PLATFORM_VARIABLE) or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"{PYTHON_TAG}-{platform}"
        build_data["force_include"][extension] = "ronde/_ronde.abi3.so"
        build_data["shared_scripts"][binary] = "ronde"
        folder = pathlib.Path(os.environ.get(PLUGINS_VARIABLE) or pathlib.Path(binary).parent.parent / "plugins")
        for plugin in self.plugins(folder):
            build_data["shared_data"][str(plugin)] = f"share/ronde/plugins/{plugin.name}"
        if notices := os.environ.get(NOTICES_VARIABLE):
            build_data["extra_metadata"][notices] = "THIRD_PARTY_LICENCES.txt"

    def built(self) -> tuple[str, str]:
        """Builds the artefacts in the checkout around this folder."""
        workspace = pathlib.Path(self.root).parent
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or workspace / "target")
        command = ["cargo", "build", "--release", "--locked", "--package", "ronde-sidecar", "--package", "ronde-python"]
        subprocess.run(command, cwd=workspace, check=True)
        environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
        subprocess.run(["make", "--silent", "plugins"], cwd=workspace, env=environment, check=True)
        return str(target / "release" / "ronde"), str(target / "release" / "lib_ronde.so")

    def plugins(self, folder: pathlib.Path) -> list[pathlib.Path]:
        """Returns the modules of all plugins in the checkout around this folder."""
        sources = (pathlib.Path(self.root).parent / "plugins").glob("*/Cargo.toml")
        names = sorted({path.parent.name for path in sources} - {"abi", "sdk"})
        paths = [folder / f"{name}.wasm" for name in names]
        if missing := [path.stem for path in paths if not path.is_file()]:
            raise RuntimeError(
                f"the wheel needs all plugins, but {folder} lacks {', '.join(missing)}; run `make plugins`, which "
                "needs Rust's target wasm32-unknown-unknown (rustup target add wasm32-unknown-unknown)"
            )
        return paths


def given() -> tuple[str, str] | None:
    """Returns the artefacts from environment variables."""
    binary, extension = os.environ.get(BINARY_VARIABLE), os.environ.get(EXTENSION_VARIABLE)
    return (binary, extension) if binary and extension else None
