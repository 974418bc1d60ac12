"""Run by every rank: a timeline as Horovod's users start and stop it, twice, with different files."""

from __future__ import annotations

import json
import pathlib
import sys

import torch

import ronde.torch as hvd


def main(folder: str) -> None:
    """Records one all-reduce a file."""
    hvd.init()
    for number in range(2):
        file = pathlib.Path(folder) / f"timeline.{number}.json"
        hvd.start_timeline(str(file), mark_cycles=True)
        hvd.allreduce(torch.ones(1_000), name=f"test_allreduce_{number}")
        hvd.stop_timeline()
        # What the other rank does next is not in this file.
        hvd.barrier()
        if hvd.rank() == 0:
            text = file.read_text()
            assert json.loads(text)
            for wanted in (
                f"allreduce.test_allreduce_{number}",
                "start_time_since_epoch_in_micros",
                "NEGOTIATE_ALLREDUCE",
                "CYCLE_START",
            ):
                assert wanted in text, wanted
            assert f"test_allreduce_{1 - number}" not in text
    hvd.barrier()
    print(f"rank {hvd.rank()}: recorded")
    hvd.shutdown()
    for call in (hvd.stop_timeline, lambda: hvd.start_timeline(folder)):
        try:
            call()
        except ValueError as error:
            assert "has not been initialized" in str(error), error
        else:
            raise AssertionError("a timeline without a session")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
