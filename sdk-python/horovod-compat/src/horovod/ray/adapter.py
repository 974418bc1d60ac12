"""What an executor does with its workers, as an interface, and the parameters of both kinds of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Callable

from ronde.ray import RayExecutor
from ronde.ray.executor import check_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ronde.ray.settings import MiniSettings

__all__ = ["Adapter", "BaseParams", "ExecutorAdapter"]


@dataclass
class BaseParams:
    """The resources of each worker, as for `RayExecutor`."""

    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a number of GPUs without `use_gpu`, or less than 1."""
        check_gpus(self.use_gpu, self.gpus_per_worker)

    @property
    def elastic(self) -> bool:
        """Whether workers come and go."""
        raise NotImplementedError("use StaticParams or ElasticParams")

    @property
    def adapter(self) -> type[Adapter]:
        """The class that starts such workers."""
        raise NotImplementedError("use StaticParams or ElasticParams")

    def named(self) -> dict[str, Any]:
        """Returns the parameters as arguments of `RayExecutor`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Adapter(ABC):
    """The methods of an executor, which `RayExecutor` describes."""

    @abstractmethod
    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers."""

    @abstractmethod
    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Returns `fn(executable)` of each rank."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Returns `fn(*args, **kwargs)` of each rank."""

    @abstractmethod
    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Begins `fn(*args, **kwargs)` on each rank; returns Ray's references."""

    @abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Returns `fn(executable)` of rank 0."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers."""


class ExecutorAdapter(Adapter):
    """An adapter that passes all calls to a `RayExecutor`.

    settings -- of the executor
    params   -- its other arguments
    """

    def __init__(self, settings: MiniSettings, **params: Any) -> None:
        self.settings = settings
        self.executor = RayExecutor(settings, **params)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the workers; raises what `RayExecutor.start` does."""
        self.executor.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Returns `fn(executable)` of each rank; raises what `RayExecutor.execute` does."""
        return self.executor.execute(fn, callbacks)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Returns `fn(*args, **kwargs)` of each rank; raises what `RayExecutor.run` does."""
        return self.executor.run(fn, args, kwargs, callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Begins `fn(*args, **kwargs)` on each rank; NotImplementedError in an elastic job."""
        return self.executor.run_remote(fn, args, kwargs)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Returns `fn(executable)` of rank 0; NotImplementedError in an elastic job."""
        return self.executor.execute_single(fn)

    def shutdown(self) -> None:
        """Ends the workers."""
        self.executor.shutdown()
