"""Where the command `ronde` of this package is."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil

COMMAND = "ronde"


def find() -> str:
    """The path of the command: what RONDE_BIN names, else that which was installed with this package, else on PATH.

    Raises FileNotFoundError when there is none.
    """
    path = os.environ.get("RONDE_BIN") or _installed() or shutil.which(COMMAND)
    if path is None:
        raise FileNotFoundError("there is no command `ronde` beside this package; install ronde's wheel with pip")
    return path


def _installed() -> str | None:
    """The command that was installed with this package, wherever pip has put scripts."""
    try:
        files = importlib.metadata.files("ronde") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (pathlib.Path(str(file.locate())) for file in files if file.name == COMMAND)
    return next((str(path.resolve()) for path in paths if os.access(path, os.X_OK) and path.is_file()), None)
