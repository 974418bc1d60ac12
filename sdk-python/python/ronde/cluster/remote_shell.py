"""The remote shell of an elastic job: `python -m ronde.cluster.remote_shell FOLDER HOST COMMAND...`.

`ronde run --remote-shell` starts it for each host. It asks the program, over a socket in FOLDER, which is that of the
call, to run the command in the process that is the host, and connects standard input and output to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import sys
import threading
from typing import TYPE_CHECKING

from ronde.cluster import frames
from ronde.cluster.agent import FILES
from ronde.private_folder import PrivateFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

# The exit status of ssh for its own failures.
_FAILED = 255
_PIECE_BYTES = 1 << 20


def main(arguments: Sequence[str]) -> int:
    """Runs the command on the host. Returns its exit status, or 255 with a message if that is not possible."""
    path, host, command = pathlib.Path(arguments[0]), arguments[1], " ".join(arguments[2:])
    with contextlib.closing(PrivateFolder(path)) as folder, socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path / frames.SOCKET))
            request = {"host": host, "folder": str(path), "command": command}
            connection.sendall(json.dumps(request).encode() + b"\n")
            threading.Thread(target=_feed, args=(frames.Sender(connection),), daemon=True).start()
            with connection.makefile("rb") as stream:
                while (frame := frames.receive(stream)) is not None:
                    if frame[0] == frames.STATUS:
                        return int(frame[1])
                    _take(folder, *frame)
        except OSError as error:
            print(f"the connection to the process that is {host} has failed: {error}", file=sys.stderr)
            return _FAILED
    print(f"the process that is {host} has ended", file=sys.stderr)
    return _FAILED


def _take(folder: PrivateFolder, kind: bytes, content: bytes) -> None:
    if kind in (frames.OUTPUT, frames.ERROR):
        descriptor = (sys.stdout if kind == frames.OUTPUT else sys.stderr).fileno()
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
    elif kind == frames.FILE:
        name, _, content = content.partition(b"\n")
        if FILES.fullmatch(name.decode()):
            folder.replace(name.decode(), content)


def _feed(sender: frames.Sender) -> None:
    """Passes standard input on, up to its end."""
    with contextlib.suppress(OSError):
        while True:
            content = os.read(sys.stdin.fileno(), _PIECE_BYTES)
            sender.send(frames.INPUT, content)
            if not content:
                return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
