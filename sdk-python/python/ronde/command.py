"""Finds the command `ronde` of this package."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil

COMMAND = "ronde"


def find() -> str:
    """Returns the path of the command: that of RONDE_BIN, else the one installed with this package, else that on PATH.

    Raises FileNotFoundError if there is none.
    """
    path = os.environ.get("RONDE_BIN") or _installed() or shutil.which(COMMAND)
    if path is None:
        raise FileNotFoundError("there is no command `ronde` beside this package; install ronde's wheel with pip")
    return path


def _installed() -> str | None:
    """Returns the command that pip installed with this package, wherever pip puts scripts."""
    try:
        files = importlib.metadata.files("ronde") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (pathlib.Path(str(file.locate())) for file in files if file.name == COMMAND)
    return next((str(path.resolve()) for path in paths if os.access(path, os.X_OK) and path.is_file()), None)
