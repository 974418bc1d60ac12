"""The program of a benchmark rank: it connects its backend and executes commands until the command to end.

The benchmark starts it: `python3 -m ronde.bench.worker --control SOCKET --backend ronde`.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from typing import TYPE_CHECKING

from ronde.bench.control import Channel
from ronde.bench.executor import Executor
from ronde.bench.named import Extras, Named

if TYPE_CHECKING:
    from ronde.bench.backends import Backend


def main() -> int:
    """Executes commands until the benchmark ends. Returns the process's exit status."""
    options = _parser().parse_args()
    channel = Channel.connect(options.control)
    try:
        backend = connect(options)
        channel.send({"rank": backend.rank, "pid": os.getpid(), "versions": backend.versions})
        executor = Executor(backend)
        while (command := channel.receive()) is not None and command["do"] != "end":
            channel.send(executor.handle(command))
        backend.close()
    except Exception as error:
        traceback.print_exc()
        channel.send({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def connect(options: argparse.Namespace) -> Backend:
    """Connects to the other ranks."""
    from ronde.bench import backends

    if options.backend == "gloo":
        return backends.Gloo(options.rank, options.ranks, options.rendezvous)
    if options.backend == "mpi":
        return backends.OpenMpi()
    codecs, reducers = (tuple(map(Named.parse, texts)) for texts in (options.codec, options.reducer))
    return backends.Ronde(Extras(codecs, reducers))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True, metavar="SOCKET")
    parser.add_argument("--backend", required=True, choices=["ronde", "gloo", "mpi"])
    parser.add_argument("--rank", type=int, help="the rank, for Gloo; other backends get it from their launchers")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--codec", action="append", default=[], metavar="NAME[:KEY=VALUE]...", help="of ronde")
    parser.add_argument("--reducer", action="append", default=[], metavar="NAME[:KEY=VALUE]...", help="of ronde")
    parser.add_argument("--rendezvous", metavar="FILE", help="the rendezvous file of Gloo's ranks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
