"""Arguments that `run` and `run_elastic` share, checked before anything starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

START_TIMEOUT_VARIABLE = "HOROVOD_SPARK_START_TIMEOUT"
START_TIMEOUT_S_DEFAULT = 600.0
# What Spark gives to its own processes, secrets among them: ranks do not get these variables.
OF_SPARK = ("_SPARK_", "PYSPARK_GATEWAY_", "PYTHON_WORKER_FACTORY_", "PYTHON_UNIX_DOMAIN_")


def start_timeout_of(given: float | None) -> float:
    """Returns the seconds to wait for room and for the ranks' start. Raises ValueError if they are not above 0."""
    text = os.environ.get(START_TIMEOUT_VARIABLE)
    if given is None and not text:
        return START_TIMEOUT_S_DEFAULT
    try:
        seconds = float(given if given is not None else text or "")
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        name = "start_timeout" if given is not None else START_TIMEOUT_VARIABLE
        raise ValueError(f"{name} is {given if given is not None else text!r}; give a number of seconds above 0")
    return seconds


def variables_of(env: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the variables for the ranks, without those of Spark's own processes.

    env -- also all of a program's, as in `env=dict(os.environ, NAME="value")`
    """
    return {name: str(value) for name, value in (env or {}).items() if not name.startswith(OF_SPARK)}


def interfaces_of(nics: Iterable[str] | str | None) -> str:
    """Returns networks as `--network-interfaces` takes them; "" for all."""
    return nics if isinstance(nics, str) else ",".join(sorted(nics or ()))
