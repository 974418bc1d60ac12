"""Run by two ranks: one ends by an exception; the other receives it with the last lines of output."""

from __future__ import annotations

import signal
import sys

import torch

import ronde.torch as hvd


def main() -> None:
    """Rank 1 crashes once both are there."""
    # The launcher ends all ranks 1 s after one has failed; rank 0 prints what it has received.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        raise ArithmeticError("the data are spoilt")
    try:
        hvd.allreduce(torch.ones(3), name="waits")
    except hvd.PeerLostError as error:
        assert error.rank == 1, error
        assert "the data are spoilt" in str(error), error
        print("rank 0 received the reason", flush=True)
        raise
    raise AssertionError("a rank that has crashed took part")


if __name__ == "__main__":
    sys.exit(main())
