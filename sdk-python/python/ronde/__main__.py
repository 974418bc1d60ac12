"""`python -m ronde` runs the command `ronde` of the environment that this package is installed in.

The command itself is a program beside `python`. Use `python -m ronde` where the environment's `bin` folder is not on
PATH.
"""

from __future__ import annotations

import os
import sys

from ronde import command


def main() -> None:
    """Replaces this process with the command."""
    try:
        path = command.find()
    except FileNotFoundError as error:
        sys.exit(f"ronde: {error}")
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()
