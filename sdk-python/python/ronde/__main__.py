"""`python -m ronde` is the command `ronde` of the environment that this package is installed in.

The command itself is a program beside `python`; this way to it is for environments whose `bin` folder is not on PATH.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil
import sys

COMMAND = "ronde"


def main() -> None:
    """Becomes the command."""
    path = installed() or shutil.which(COMMAND)
    if path is None:
        sys.exit("ronde: there is no command `ronde` beside this package; install ronde's wheel with pip")
    os.execv(path, [path, *sys.argv[1:]])


def installed() -> str | None:
    """The command that was installed with this package, wherever pip has put scripts."""
    try:
        files = importlib.metadata.files("ronde") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (pathlib.Path(str(file.locate())) for file in files if file.name == COMMAND)
    return next((str(path.resolve()) for path in paths if os.access(path, os.X_OK) and path.is_file()), None)


if __name__ == "__main__":
    main()
