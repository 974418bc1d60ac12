"""What runs the training function of an estimator on all ranks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, Callable


def default_num_proc() -> int:
    """Returns Spark's default parallelism. Raises RuntimeError without a session of Spark."""
    from ronde.spark import session

    return session.active().default_size()


class Backend(ABC):
    """Runs a function on the ranks of a job. A program may give an estimator its own, for ranks outside of Spark."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on all ranks of one job. Returns their results by rank.

        env -- environment variables of the ranks; default: those of this process
        """

    @abstractmethod
    def num_processes(self) -> int:
        """Returns the number of ranks."""


class SparkBackend(Backend):
    """Ranks are tasks of Spark: `ronde.spark.run`.

    num_proc -- the number of ranks; default: Spark's default parallelism
    env      -- environment variables of the ranks, unless `run` gets others
    kwargs   -- further arguments of `ronde.spark.run`
    """

    def __init__(self, num_proc: int | None = None, env: dict[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = default_num_proc() if num_proc is None else num_proc
        self._env, self._options = env, kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Calls a function on all ranks. Raises what `ronde.spark.run` does."""
        import ronde.spark

        variables = env if env is not None else self._env
        results: list[Any] = ronde.spark.run(
            fn, args=args, kwargs=kwargs or {}, num_proc=self._num_proc, env=variables, **self._options
        )
        return results

    def num_processes(self) -> int:
        """Returns the number of ranks."""
        return self._num_proc


class LocalBackend(Backend):
    """Ranks are processes on the driver's host: `ronde.run`. For small data sets, and for programs without a cluster.

    num_proc -- the number of ranks
    env      -- environment variables of the ranks besides this process's
    """

    def __init__(self, num_proc: int, env: dict[str, str] | None = None) -> None:
        self._num_proc, self._env = num_proc, dict(env or {})

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Calls a function on all ranks. Raises what `ronde.run` does."""
        import ronde

        return ronde.run(_with_variables, (fn, args, kwargs or {}, {**self._env, **(env or {})}), np=self._num_proc)

    def num_processes(self) -> int:
        """Returns the number of ranks."""
        return self._num_proc


def _with_variables(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], env: dict[str, str]) -> Any:
    os.environ.update(env)
    return fn(*args, **kwargs)
