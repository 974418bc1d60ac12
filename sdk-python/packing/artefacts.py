"""What cargo compiles for the wheel: three artefacts for its platform, and the plugins, which are WebAssembly."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# The packages, and in the same order the files that cargo makes of them.
PACKAGES = ("ronde-sidecar", "ronde-python", "ronde-nccl-net")
FILES = ("ronde", "lib_ronde.so", "libnccl_net_ronde.so")
PLUGIN_TARGET = "wasm32-unknown-unknown"
# In the folder of plugins, but libraries that these use.
PLUGIN_LIBRARIES = {"abi", "sdk"}


def plugins() -> list[str]:
    """Returns the names of the plugins in this checkout."""
    names = {path.parent.name for path in (ROOT / "plugins").glob("*/Cargo.toml")}
    return sorted(names - PLUGIN_LIBRARIES)


def plugin_packages() -> tuple[str, ...]:
    """Returns the packages of the plugins."""
    return tuple(f"ronde-plugin-{name}" for name in plugins())


def all_packages() -> tuple[str, ...]:
    """Returns the packages of whatever cargo compiles for the wheel."""
    return (*PACKAGES, *plugin_packages())


def options(packages: tuple[str, ...]) -> list[str]:
    """Returns cargo's options that select packages."""
    return [word for name in packages for word in ("--package", name)]
