"""The output of `horovodrun --check-build`."""

from __future__ import annotations

import importlib.util

import ronde
from horovod.version import __version__


def table(is_verbose: bool = False) -> str:
    """Returns the capabilities of this installation, in Horovod's form."""
    found, problem = _torch()
    blocks = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": found, "MXNet": False},
        "Available Controllers": {"MPI": False, "Gloo": True, "ronde": True},
        "Available Tensor Operations": {
            "NCCL": False,
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
    if is_verbose and problem:
        lines += ["", f"PyTorch: {problem}"]
    return "\n".join(lines) + "\n"


def _torch() -> tuple[bool, str]:
    """Returns whether PyTorch can be imported, and if not, why."""
    if importlib.util.find_spec("torch") is None:
        return False, "it is not installed"
    try:
        import torch  # noqa: F401
    except Exception as error:
        return False, f"it cannot be imported: {error}"
    return True, ""
