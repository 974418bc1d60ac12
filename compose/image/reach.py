"""Containers as hosts of an elastic job: a remote shell over Unix sockets in a volume, without ssh.

    reach.py serve FOLDER                  in a host's container: runs `ronde agent` for each connection
    reach.py call FOLDER HOST COMMAND      in the launcher's: the remote shell of `ronde run`
    reach.py hosts FOLDER SLOTS            in the launcher's: prints the hosts, for --host-discovery-script

The folder is private to the user of these containers. SIGTERM to `serve`, as by `docker stop`, is passed on to the
agent as a notice of preemption; `serve` ends with the agent.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

CHUNK_BYTES = 1 << 16
# What ssh exits with when it does not reach a host.
EXIT_UNREACHABLE = 255


def main() -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve")
    serving.add_argument("folder", type=pathlib.Path)
    serving.add_argument("--name", default=socket.gethostname(), help="the host's name")
    calling = commands.add_parser("call")
    calling.add_argument("folder", type=pathlib.Path)
    calling.add_argument("host")
    calling.add_argument("line", nargs="*", help="ignored: the other side runs `ronde agent`")
    listing = commands.add_parser("hosts")
    listing.add_argument("folder", type=pathlib.Path)
    listing.add_argument("slots", type=int)
    given = parser.parse_args()
    if given.command == "serve":
        return serve(given.folder / f"{given.name}.sock")
    if given.command == "call":
        return call(given.folder / f"{given.host}.sock")
    print("".join(f"{path.stem}:{given.slots}\n" for path in sorted(given.folder.glob("*.sock"))), end="")
    return 0


def serve(path: pathlib.Path) -> int:
    """Runs an agent for each connection, one after the other, until SIGTERM."""
    agent: subprocess.Popen[bytes] | None = None
    is_ending = False

    def end(*_: Any) -> None:
        nonlocal is_ending
        is_ending = True
        path.unlink(missing_ok=True)
        if agent is None:
            sys.exit(0)
        # The first one lets the workers leave. The loop below waits for the agent.
        agent.terminate()

    os.umask(0o077)
    # That of a container that was killed.
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)
    signal.signal(signal.SIGTERM, end)
    ronde = os.environ.get("RONDE_BIN") or shutil.which("ronde") or "ronde"
    while True:
        connection, _ = listener.accept()
        with connection:
            agent = subprocess.Popen([ronde, "agent"], stdin=connection, stdout=connection)
        agent.wait()
        agent = None
        if is_ending:
            return 0


def call(path: pathlib.Path) -> int:
    """Connects standard input and output to the agent behind a socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError as error:
        print(f"cannot reach {path.stem}: {error.strerror}", file=sys.stderr)
        return EXIT_UNREACHABLE
    threading.Thread(target=forward, args=(connection,), daemon=True).start()
    while received := connection.recv(CHUNK_BYTES):
        sys.stdout.buffer.write(received)
        sys.stdout.buffer.flush()
    return 0


def forward(connection: socket.socket) -> None:
    """Sends standard input, and its end."""
    try:
        while given := os.read(sys.stdin.fileno(), CHUNK_BYTES):
            connection.sendall(given)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        # The agent has ended, which the other direction reports.
        return


if __name__ == "__main__":
    sys.exit(main())
