"""Environment variables: those that a launcher exports, and the rank that it sets."""

from __future__ import annotations

import os
import re

from horovod.runner.common.util.secret import HOROVOD_SECRET_KEY
from ronde import _ronde

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", HOROVOD_SECRET_KEY}
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"


def is_exportable(v: str) -> bool:
    """Returns whether a launcher exports the variable of this name to its processes."""
    return not any(re.fullmatch(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and size, from the variables of its launcher; (0, 1) without a launcher.

    Reads the variables of `ronde run`, horovodrun, torchrun, mpirun, mpiexec, srun and jsrun. Raises RuntimeError if
    only one of both is set.
    """
    launched = _ronde.LaunchedBy.detect(dict(os.environ))
    if launched is None:
        return 0, 1
    if launched.rank is None or launched.size is None:
        raise RuntimeError(
            f"{launched.launcher} has set rank {launched.rank} and size {launched.size}; both are needed"
        )
    return launched.rank, launched.size
