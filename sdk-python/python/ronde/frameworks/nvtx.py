"""Ranges of NVTX, which Nsight Systems shows: submissions and waits of operations, through NVIDIA's library.

Ranges are on where Nsight Systems has started the process, or with RONDE_NVTX=1. HOROVOD_DISABLE_NVTX_RANGES=1 switches
them off, as in Horovod. Nothing is compiled: the library is opened at the first operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import pathlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_ON = "RONDE_NVTX"
_OFF = "HOROVOD_DISABLE_NVTX_RANGES"
_LIBRARY = "RONDE_NVTX_LIBRARY"
# `nsys profile` sets it.
_PROFILER = "NVTX_INJECTION64_PATH"
_FILE = "libnvToolsExt.so.1"


@functools.cache
def load() -> Any:
    """Returns NVIDIA's library if ranges are on, else None. Warns once if they were requested and it does not open."""
    requested = os.environ.get(_ON, "") not in ("", "0")
    is_off = os.environ.get(_OFF, "") not in ("", "0")
    if is_off or not (requested or os.environ.get(_PROFILER)):
        return None
    reasons = []
    for file in _files():
        try:
            opened = ctypes.CDLL(file)
            opened.nvtxRangePushA.argtypes = [ctypes.c_char_p]
            opened.nvtxRangePop.argtypes = []
            return opened
        except (OSError, AttributeError) as error:
            reasons.append(str(error))
    if requested:
        warnings.warn(
            f"{_ON} is set, but there are no ranges of NVTX: {'; '.join(reasons)}. Install NVTX, for example by "
            f"`pip install nvidia-nvtx-cu12`, or name its file in {_LIBRARY}",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def _files() -> list[str]:
    """Where the library may be: the named file only, or that of the system, then of NVIDIA's package."""
    if named := os.environ.get(_LIBRARY):
        return [named]
    files = [_FILE]
    try:
        spec = importlib.util.find_spec("nvidia")
    except ValueError:  # a module of this name that was made by hand has no specification
        spec = None
    if spec is not None:
        folders = [pathlib.Path(folder) / "nvtx" / "lib" for folder in spec.submodule_search_locations or ()]
        files += [str(folder / _FILE) for folder in folders if (folder / _FILE).exists()]
    return files


@contextlib.contextmanager
def pushed(opened: Any, text: str) -> Iterator[None]:
    """A range of the calling thread."""
    opened.nvtxRangePushA(text.encode("utf-8", "replace"))
    try:
        yield
    finally:
        opened.nvtxRangePop()
