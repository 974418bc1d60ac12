"""`gloo_run` and `gloo_run_elastic`, which Horovod calls inside of `horovod.spark.run`."""

from __future__ import annotations

from typing import Any, NoReturn

from horovod.spark.starters import no_starter

__all__ = ["gloo_run", "gloo_run_elastic"]


def gloo_run(
    executable: Any, settings: Any, nics: Any, driver: Any, env: Any, stdout: Any = None, stderr: Any = None
) -> NoReturn:
    """Raises RuntimeError with the alternative."""
    raise no_starter("horovod.spark.gloo_run.gloo_run")


def gloo_run_elastic(settings: Any, driver: Any, env: Any, stdout: Any = None, stderr: Any = None) -> NoReturn:
    """Raises RuntimeError with the alternative."""
    raise no_starter("horovod.spark.gloo_run.gloo_run_elastic")
