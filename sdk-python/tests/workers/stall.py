"""Run by every rank: the last one is a straggler until rank 0 has read the report about it."""

from __future__ import annotations

import logging
import pathlib
import sys
import time

import numpy

import ronde


class Reports(logging.Handler):
    """Prints reports, and leaves a sign when there is one of a missing rank."""

    def __init__(self, sign: pathlib.Path) -> None:
        super().__init__()
        self.sign = sign

    def emit(self, record: logging.LogRecord) -> None:
        """One message of the sidecar."""
        print(record.getMessage(), flush=True)
        if "has not asked for" in record.getMessage():
            self.sign.touch()


def main() -> None:
    """An all-gather of all ranks, then an all-reduce for which one comes late."""
    sign = pathlib.Path(sys.argv[1])
    logging.getLogger("ronde").addHandler(Reports(sign))
    with ronde.connect() as client:
        client.allgather(numpy.ones(2), name="x")  # the last call
        while client.rank == client.size - 1 and not sign.exists():
            time.sleep(0.02)
        client.allreduce(numpy.ones(2), name="grad.7")


if __name__ == "__main__":
    main()
