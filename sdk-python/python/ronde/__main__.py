"""`python -m ronde` is the command `ronde` of the environment that this package is installed in.

The command itself is a program beside `python`; this way to it is for environments whose `bin` folder is not on PATH.
"""

from __future__ import annotations

import os
import shutil
import sys

from ronde.command import COMMAND, installed


def main() -> None:
    """Becomes the command."""
    path = installed() or shutil.which(COMMAND)
    if path is None:
        sys.exit("ronde: there is no command `ronde` beside this package; install ronde's wheel with pip")
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
