"""`RayExecutor`: functions on all ranks of a job, whose processes are actors of Ray."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable

from ronde.ray.elastic import ElasticOptions, ElasticWorkers
from ronde.ray.executable import Executable
from ronde.ray.settings import MiniSettings, adopted, discovery_of
from ronde.ray.static import StaticWorkers
from ronde.ray.strategy import ColocatedStrategy, PGStrategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Callbacks = Sequence[Callable[[Any], Any]]


class RayExecutor:
    """Runs functions on workers, actors of Ray, which are the ranks of a job; each node has one sidecar.

        executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
        executor.start()
        losses = executor.run(train, args=[0.1])
        executor.shutdown()

    settings                        -- from `create_settings`, or another object with attributes of its names, such as
                                       Horovod's `Settings`; default: those of `create_settings`
    num_workers                     -- the number of ranks, on as few nodes as possible
    num_hosts, num_workers_per_host -- instead of it: so many nodes, and ranks on each
    cpus_per_worker                 -- CPUs that Ray reserves for each rank
    use_gpu, gpus_per_worker        -- whether ranks have GPUs, and how many each; default: 1. A rank sees the GPUs of
                                       all ranks of its node (CUDA_VISIBLE_DEVICES), in the order of local ranks
    use_current_placement_group     -- whether ranks run in the placement group of the calling actor or task, if any
    min_workers, max_workers        -- instead of num_workers: an elastic job, with the least and the most ranks
    reset_limit, cooldown_range, elastic_timeout -- of an elastic job, as the options of `ronde run`
    override_discovery              -- whether the nodes of an elastic job are those of Ray's table; otherwise those
                                       that `settings.discovery` finds, which is required then
    cpus_per_slot                   -- another name of cpus_per_worker

    Ranks on one node are consecutive. Raises ValueError for arguments that contradict each other.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Iterable[str] | str | None = None,
        *,
        verbose: int = 0,
        job_secret_file: str | None = None,
        certs: str | None = None,
        discovery: Any = None,
    ) -> MiniSettings:
        """Returns settings; `MiniSettings` describes them."""
        given = nics if nics is None or isinstance(nics, str) else tuple(nics)
        return MiniSettings(
            timeout_s,
            placement_group_timeout_s,
            given,
            ssh_identity_file,
            ssh_str,
            verbose,
            job_secret_file,
            certs,
            discovery,
        )

    def __init__(
        self,
        settings: Any = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        *,
        cpus_per_slot: float | None = None,
    ) -> None:
        self.settings = adopted(settings, MiniSettings)
        check_gpus(use_gpu, gpus_per_worker)
        cpus_per_worker = cpus_per_worker if cpus_per_slot is None else cpus_per_slot
        self._workers: StaticWorkers | ElasticWorkers
        if min_workers is not None:
            _check_elastic(min_workers, max_workers, num_workers, num_hosts)
            options = ElasticOptions(min_workers, max_workers, cpus_per_worker, use_gpu, gpus_per_worker)
            options.reset_limit, options.cooldown_range = reset_limit, cooldown_range
            options.elastic_timeout = elastic_timeout
            options.discovery = discovery_of(self.settings, override_discovery)
            self._workers = ElasticWorkers(self.settings, options)
            self.num_workers = min_workers
            return
        if max_workers is not None:
            raise ValueError("max_workers is set, but min_workers is not; give both for an elastic job")
        resources = (use_gpu, cpus_per_worker, gpus_per_worker)
        strategy: PGStrategy | ColocatedStrategy
        if num_workers is not None and num_hosts is None:
            _check_number("num_workers", num_workers)
            strategy = PGStrategy(self.settings, num_workers, *resources, use_current_placement_group)
        elif num_hosts is not None and num_workers is None:
            _check_number("num_hosts", num_hosts)
            _check_number("num_workers_per_host", num_workers_per_host)
            strategy = ColocatedStrategy(self.settings, num_hosts, num_workers_per_host, *resources)
        else:
            raise ValueError(
                "give either num_workers, or num_hosts (with num_workers_per_host), or min_workers for an elastic job"
            )
        self._workers = StaticWorkers(strategy, self.settings)
        self.num_workers = strategy.num_workers

    @property
    def workers(self) -> list[Any]:
        """The actors, by rank; none before `start`, and none in an elastic job."""
        return self._workers.workers if isinstance(self._workers, StaticWorkers) else []

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts workers and sidecars.

        executable_cls -- a class of which each worker makes an object, for `execute`; the job has begun by then
        executable_args, executable_kwargs -- its arguments
        extra_env_vars -- variables for the workers and their sidecars

        Raises TimeoutError if there are too few places for the workers, with the numbers; RondeError if sidecars cannot
        be started or cannot authenticate each other; and WorkerError if the class raises an error. In an elastic job
        workers start with each call, which then raises these.
        """
        executable = Executable(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        self._workers.start(executable, dict(extra_env_vars or {}))

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks | None = None) -> list[Any]:
        """Returns `fn(executable)` of each rank; the executable is None unless `start` was given a class.

        callbacks -- called in this process with each value that rank 0 passes to `ronde.ray.log`

        Raises WorkerError, a RuntimeError, if a rank of a fixed job raises an error or its process ends. It names rank
        and node, and has the first traceback. Ranks that have not ended 5 s later are ended; then only `shutdown` can
        be called. An elastic job continues without such a rank; it raises RuntimeError if fewer than `min_workers`
        remain, with the first traceback, or if results are missing at its end. Raises the exception of a callback,
        after all workers have been ended.
        """
        return self._workers.execute(fn, callbacks)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Callbacks | None = None,
    ) -> list[Any]:
        """Returns `fn(*args, **kwargs)` of each rank. Otherwise as `execute`."""
        return self._workers.execute(_without_executable(fn, args, kwargs), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Begins `fn(*args, **kwargs)` on each rank. Returns Ray's references to the results, for `ray.get`.

        Nothing here watches these: a rank that fails fails the collectives of the others only when its process ends.
        """
        return self._static("run_remote").submit(_without_executable(fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Returns `fn(executable)` of rank 0. Raises WorkerError if it fails."""
        return self._static("execute_single").execute_single(fn)

    def _static(self, name: str) -> StaticWorkers:
        if isinstance(self._workers, StaticWorkers):
            return self._workers
        raise NotImplementedError(f"{name} is for a fixed number of workers; an elastic job has run and execute")

    def shutdown(self) -> None:
        """Ends sessions, sidecars and workers, and gives the places back. The executor can be started again."""
        self._workers.shutdown()


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], executable: Any) -> Any:
    del executable
    return fn(*args, **kwargs)


def _without_executable(
    fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Callable[[Any], Any]:
    return functools.partial(_call, fn, tuple(args or ()), dict(kwargs or {}))


def _check_number(name: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{name} is {number}; it is at least 1")


def _check_elastic(least: int, most: int | None, num_workers: int | None, num_hosts: int | None) -> None:
    if num_workers is not None or num_hosts is not None:
        raise ValueError("min_workers is for an elastic job, num_workers and num_hosts for a fixed one; give only one")
    _check_number("min_workers", least)
    if most is not None and most < least:
        raise ValueError(f"max_workers is {most}, less than min_workers, which is {least}")


def check_gpus(use_gpu: bool, gpus_per_worker: float | None) -> None:
    """Raises ValueError for a number of GPUs without `use_gpu`, or less than 1."""
    if gpus_per_worker is not None and not use_gpu:
        raise ValueError("gpus_per_worker is set, but use_gpu is not; set use_gpu=True")
    if gpus_per_worker is not None and gpus_per_worker < 1:
        raise ValueError(f"gpus_per_worker is {gpus_per_worker}; it is at least 1: ranks do not share a GPU")
