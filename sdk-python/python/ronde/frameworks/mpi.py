"""What programs for Horovod ask about MPI. ronde calls no MPI: its launchers start processes, programs use mpi4py."""

from __future__ import annotations

import os
import sys

from ronde import _ronde

# As the table of launchers names them; prterun and others that speak PMI are no MPI.
_LAUNCHERS = ("mpirun", "mpiexec.hydra")
_THREADS_DISABLED = "HOROVOD_MPI_THREADS_DISABLE"


def has_started_this() -> bool:
    """Returns whether a launcher of MPI, such as mpirun, has started this process."""
    launched = _ronde.LaunchedBy.detect(dict(os.environ))
    return launched is not None and launched.launcher in _LAUNCHERS


def has_threads() -> bool:
    """Returns whether several threads may call MPI: that of mpi4py if it is initialized, or one that will be."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)
    return os.environ.get(_THREADS_DISABLED) != "1"
