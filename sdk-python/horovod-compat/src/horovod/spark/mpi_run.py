"""`mpi_run`, which Horovod calls inside of `horovod.spark.run`."""

from __future__ import annotations

from typing import Any, NoReturn

from horovod.spark.starters import no_starter

__all__ = ["mpi_run"]


def mpi_run(
    executable: Any, settings: Any, nics: Any, driver: Any, env: Any, stdout: Any = None, stderr: Any = None
) -> NoReturn:
    """Raises RuntimeError with the alternative."""
    raise no_starter("horovod.spark.mpi_run.mpi_run")
