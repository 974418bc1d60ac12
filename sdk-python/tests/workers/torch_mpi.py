"""Run by mpirun, without a launcher of ronde: ranks are MPI's, and sessions and process sets take its communicators."""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

import ronde.torch as hvd


def main() -> None:
    """A session of all with a set for each half; then a session for each half."""
    torch.set_num_threads(1)
    everybody = MPI.COMM_WORLD
    half = everybody.Split(color=everybody.rank % 2, key=everybody.rank)
    own = [rank for rank in range(everybody.size) if rank % 2 == everybody.rank % 2]
    some = hvd.ProcessSet(half)
    try:
        hvd.init(process_sets=[some])
    except NotImplementedError as error:
        assert "hvd.init(comm" in str(error), error
    else:
        raise AssertionError("a set of a communicator needs no global one")
    assert (hvd.mpi_built(), hvd.gloo_built()) == (True, True)
    hvd.init(everybody, process_sets=[some])
    assert (hvd.mpi_enabled(), hvd.gloo_enabled()) == (True, False)
    assert hvd.mpi_threads_supported() == (MPI.Query_thread() == MPI.THREAD_MULTIPLE)
    assert (hvd.rank(), hvd.size()) == (everybody.rank, everybody.size)
    assert (hvd.local_rank(), hvd.cross_size()) == (everybody.rank, 1)
    assert some.ranks == own
    assert some.process_set_id == 1 + everybody.rank % 2
    assert hvd.global_process_set.mpi_comm is everybody
    assert hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=some).item() == sum(own)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == everybody.size
    hvd.barrier()
    hvd.shutdown()
    hvd.init(half)
    assert (hvd.rank(), hvd.size()) == (half.rank, half.size)
    assert hvd.allreduce(torch.tensor([everybody.rank]), op=hvd.Sum).item() == sum(own)
    # Ranks of a half join at their own pace.
    for step in range(half.rank + 1):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"s.{step}").item() == half.size - step
    assert hvd.join() == half.size - 1
    hvd.shutdown()
    try:
        hvd.mpi_threads_supported()
    except ValueError as error:
        assert "not been initialized" in str(error), error
    else:
        raise AssertionError("there is an answer without a session")
    assert (hvd.mpi_enabled(), hvd.gloo_enabled()) == (False, False)
    print(f"rank {everybody.rank}: communicators hold", flush=True)


if __name__ == "__main__":
    sys.exit(main())
