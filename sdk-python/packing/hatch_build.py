"""Puts what cargo builds into the wheel: the extension module, the command `ronde` as a script of the environment, and
where the command finds them, beside the folder `bin`, the shipped plugins (`share/ronde/plugins`) and NCCL's net plugin
(`share/ronde/nccl`).

The wheel has three compiled artefacts of one workspace, two libraries and a program. Wheel builders for Rust support
only one of them, so cargo builds all at once, with the same features, and this hook only places them. pip installs the
program as a script in the environment's `bin` folder: the command runs without Python.

`wheel.py` passes the artefacts in environment variables. Without it (`pip install ./sdk-python`) cargo and
`make plugins` build them here. The build fails if a plugin is missing.
"""

from __future__ import annotations

import filecmp
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# hatchling loads this file by its path.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from artefacts import FILES, PACKAGES, options, plugins

# The artefacts; without all of them, cargo builds them.
BINARY_VARIABLE = "RONDE_WHEEL_BINARY"
EXTENSION_VARIABLE = "RONDE_WHEEL_EXTENSION"
NCCL_NET_VARIABLE = "RONDE_WHEEL_NCCL_NET"
# The folder of the plugins; default: that of `make plugins`.
PLUGINS_VARIABLE = "RONDE_WHEEL_PLUGINS"
# The platform part of the wheel's tag; default: this machine's.
PLATFORM_VARIABLE = "RONDE_WHEEL_PLATFORM"
# The licences of compiled-in crates; a wheel that is not distributed needs none.
NOTICES_VARIABLE = "RONDE_WHEEL_NOTICES"
# The list of components, as `sbom.py` makes it.
SBOM_VARIABLE = "RONDE_WHEEL_SBOM"
# The extension uses the stable ABI of this Python and every later one (sdk-python/Cargo.toml).
PYTHON_TAG = "cp39-abi3"


class Artefacts(BuildHookInterface):  # type: ignore[type-arg]
    """The hook; hatchling finds it by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Sets the wheel's files and its tag."""
        check_system(sys.platform, os.environ.get(PLATFORM_VARIABLE, ""))
        binary, extension, nccl_net = given() or self.built()
        if version == "editable":
            # Python imports from the checkout, so the extension has to be there.
            place(pathlib.Path(extension), pathlib.Path(self.root, "python", "ronde", "_ronde.abi3.so"))
        else:
            platform = os.environ.get(PLATFORM_VARIABLE) or sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"{PYTHON_TAG}-{platform}"
            build_data["force_include"][extension] = "ronde/_ronde.abi3.so"
        build_data["shared_scripts"][binary] = "ronde"
        build_data["shared_data"][nccl_net] = "share/ronde/nccl/libnccl-net-ronde.so"
        folder = pathlib.Path(os.environ.get(PLUGINS_VARIABLE) or pathlib.Path(binary).parent.parent / "plugins")
        for plugin in self.plugins(folder):
            build_data["shared_data"][str(plugin)] = f"share/ronde/plugins/{plugin.name}"
        if notices := os.environ.get(NOTICES_VARIABLE):
            build_data["extra_metadata"][notices] = "THIRD_PARTY_LICENCES.txt"
        if components := os.environ.get(SBOM_VARIABLE):
            build_data["sbom_files"].append(components)

    def built(self) -> tuple[str, str, str]:
        """Builds the artefacts in the checkout around this folder."""
        workspace = pathlib.Path(self.root).parent
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or workspace / "target")
        command = ["cargo", "build", "--release", "--locked", *options(PACKAGES)]
        subprocess.run(command, cwd=workspace, check=True)
        environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
        subprocess.run(["make", "--silent", "plugins"], cwd=workspace, env=environment, check=True)
        binary, extension, nccl_net = (str(target / "release" / name) for name in FILES)
        return binary, extension, nccl_net

    def plugins(self, folder: pathlib.Path) -> list[pathlib.Path]:
        """Returns the modules of all plugins in the checkout around this folder."""
        paths = [folder / f"{name}.wasm" for name in plugins()]
        if missing := [path.stem for path in paths if not path.is_file()]:
            raise RuntimeError(
                f"the wheel needs all plugins, but {folder} lacks {', '.join(missing)}; run `make plugins`, which "
                "needs Rust's target wasm32-unknown-unknown (rustup target add wasm32-unknown-unknown)"
            )
        return paths


def check_system(system: str, wanted: str) -> None:
    """Raises RuntimeError that says what to do, unless the wheel is for Linux.

    system -- that on which the wheel is built, as in `sys.platform`
    wanted -- the platform part of the wheel's tag; empty for this machine's
    """
    if (wanted or system).startswith(("linux", "manylinux", "musllinux")):
        return
    name = wanted or {"darwin": "macOS", "win32": "Windows"}.get(system, system)
    raise RuntimeError(
        f"there is no wheel of ronde for {name}: workers and sidecars share memory by memfd, and pass it and their "
        "identities over Unix sockets as only Linux does (sealed memory, SO_PEERCRED). On macOS and Windows run it in "
        "a Linux container or virtual machine, for example with the images of compose/Dockerfile (docs/DEPLOYMENT.md)"
    )


def place(source: pathlib.Path, to: pathlib.Path) -> None:
    """Copies a file under its name at once, as programs may have the old one open. One that is the same is kept."""
    if to.exists() and filecmp.cmp(source, to, shallow=False):
        return
    new = to.with_name(f".{to.name}.new")
    shutil.copy(source, new)
    new.replace(to)


def given() -> tuple[str, str, str] | None:
    """Returns the artefacts from environment variables."""
    binary, extension = os.environ.get(BINARY_VARIABLE), os.environ.get(EXTENSION_VARIABLE)
    nccl_net = os.environ.get(NCCL_NET_VARIABLE)
    return (binary, extension, nccl_net) if binary and extension and nccl_net else None
