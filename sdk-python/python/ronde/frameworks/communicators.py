"""Conversion of users' ranks: lists of numbers, and communicators of mpi4py, which is optional."""

from __future__ import annotations

import operator
import sys
from typing import Any


def is_communicator(given: Any) -> bool:
    """Returns whether an object is a communicator of mpi4py."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(given, mpi.Comm)


def rank_list(given: Any, who: str) -> list[int]:
    """Returns ranks as numbers. Raises ValueError for anything else."""
    try:
        ranks = [operator.index(rank) for rank in given]
    except TypeError:
        ranks = [-1]
    if any(rank < 0 for rank in ranks):
        raise ValueError(f"{who} ranks, as integers from 0, or a communicator of mpi4py; not {given!r}")
    return ranks


def world_ranks(communicator: Any) -> list[int]:
    """Returns the ranks in MPI.COMM_WORLD of a communicator's processes, in its own order."""
    mpi = sys.modules["mpi4py.MPI"]
    group, everybody = communicator.Get_group(), mpi.COMM_WORLD.Get_group()
    try:
        ranks = mpi.Group.Translate_ranks(group, range(group.Get_size()), everybody)
    finally:
        group.Free()
        everybody.Free()
    return [int(rank) for rank in ranks]


def check_started_by_mpi(job_size: int) -> None:
    """Raises ValueError if MPI does not know the job's other processes, because its ranks have no meaning then."""
    size = sys.modules["mpi4py.MPI"].COMM_WORLD.Get_size()
    if size != job_size:
        raise ValueError(
            f"MPI.COMM_WORLD has {size} processes, but the job has {job_size}: communicators mean something only when "
            "mpirun started the job: `mpirun -np N python ...`"
        )
