"""The output of `horovodrun --check-build`."""

from __future__ import annotations

import importlib
import importlib.util
import os

import ronde
from horovod.build_variables import build_variables
from horovod.runner import mpi
from horovod.version import __version__
from ronde.frameworks.basics import nccl_built


def table(is_verbose: bool = False) -> str:
    """Returns the capabilities of this installation, in Horovod's form.

    Raises ValueError for values of RONDE_GPU_STAGING and RONDE_GPU_LEVELS that are invalid.
    """
    modules = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
    found = {name: _found(module) for name, module in modules.items()}
    blocks = {
        "Available Frameworks": {name: not problem for name, problem in found.items()},
        "Available Controllers": {"MPI": _has_open_mpi(), "Gloo": True, "ronde": True},
        "Available Tensor Operations": {
            # As `nccl_built()`: where two levels are chosen, and the driver and NCCL are installed.
            "NCCL": bool(nccl_built()),
            "DDL": False,
            "CCL": False,
            "MPI": False,
            "Gloo": True,
            "ronde": True,
        },
    }
    lines = [f"Horovod v{__version__}:", ""]
    for title, parts in blocks.items():
        lines += [f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for name, there in parts.items()), ""]
    # As `gloo_built()`: scripts use this to detect whether jobs run on CPUs without MPI.
    lines.append(
        f"Answered by ronde {ronde.__version__}, which does what is marked as Gloo's; there is no Gloo inside."
    )
    if blocks["Available Controllers"]["MPI"]:
        lines.append("Open MPI starts processes, with `horovodrun --mpi`; tensors do not go through it.")
    if given := build_variables(os.environ):
        lines.append(f"Nothing is compiled, so these variables have no effect: {', '.join(given)}.")
    problems = [f"{name}: {problem}" for name, problem in found.items() if problem]
    if is_verbose and problems:
        lines += ["", *problems]
    return "\n".join(lines) + "\n"


def _has_open_mpi() -> bool:
    """Returns whether `horovodrun --mpi` finds an mpirun that it can use."""
    try:
        mpi.find()
    except (OSError, ValueError):
        return False
    return True


def _found(module: str) -> str:
    """Returns why a framework cannot be imported; empty if it can."""
    if importlib.util.find_spec(module) is None:
        return "it is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"it cannot be imported: {error}"
    return ""
