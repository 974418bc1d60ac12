"""Run by every rank: the last rank fails as the argument selects, and the others print the reported failure."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys

import numpy

import ronde


def fail(mode: str, client: ronde.Client) -> None:
    """Ends this process."""
    print("about to fail", file=sys.stderr, flush=True)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "memory":
        hoard = [bytearray(b"x" * (64 << 20)) for _ in range(64)]
        print(len(hoard))
    if mode == "exit":
        client.close()
        os._exit(3)  # an interpreter that ends by itself may take longer than the others wait
    if mode == "close":
        client.close()
        sys.exit(0)
    raise ValueError("the loss is not a number \x1b[2J")  # the exception


def main() -> None:
    """All ranks agree once; then one is missing."""
    # The launcher ends the others shortly after the first; this rank must print its report before.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client = ronde.connect()
    client.allreduce(numpy.ones(4), name="first")
    alone = client.add_process_set([client.size - 1])
    if client.rank == client.size - 1:
        client.allreduce(numpy.ones(4), name="last", process_set=alone)  # the last call
        fail(sys.argv[1], client)
    try:
        client.allreduce(numpy.ones(4), name="never")
    except ronde.RondeError as error:
        record = None if error.record is None else dataclasses.asdict(error.record)
        parts = {"kind": type(error).__name__, "text": str(error), "code": error.code, "record": record}
        print("reported", json.dumps(parts), flush=True)
    else:
        raise AssertionError("the last rank took part")


if __name__ == "__main__":
    main()
