"""A fixed number of workers: actors of Ray that stay until `shutdown`, and run one function after the other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable

import ray

from ronde.cluster import sidecars
from ronde.cluster.credentials import named
from ronde.cluster.layout import Layout, by_node
from ronde.cluster.planning import Options
from ronde.ray import failures, job
from ronde.ray.reports import Reports
from ronde.ray.worker import BaseHorovodWorker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ronde.ray.executable import Executable
    from ronde.ray.settings import MiniSettings
    from ronde.ray.strategy import ColocatedStrategy, PGStrategy

# Workers that do not end their sessions in this time are ended without.
_LEAVE_TIMEOUT_S = 10.0


class StaticWorkers:
    """The workers of a job.

    strategy -- where they run
    settings -- how long to wait, and credentials
    """

    def __init__(self, strategy: PGStrategy | ColocatedStrategy, settings: MiniSettings) -> None:
        self._strategy, self._settings = strategy, settings
        self.workers: list[Any] = []
        self._layout = Layout([])
        self._ended: str | None = None

    def start(self, executable: Executable, variables: Mapping[str, str]) -> None:
        """Starts workers and sidecars. Raises what `job.begin` and the strategy do; then nothing is left."""
        if self.workers:
            raise RuntimeError("the executor has workers already; call shutdown() before start()")
        self._ended = None
        try:
            self._start(executable, variables)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, executable: Executable, variables: Mapping[str, str]) -> None:
        settings = self._settings
        given = named(settings.certs, settings.job_secret_file)
        self.workers = self._strategy.create_workers(ray.remote(BaseHorovodWorker))
        patience = max(settings.timeout_s, settings.placement_group_timeout_s)
        self._layout = Layout(job.places(self._call, len(self.workers), patience))
        order = by_node(self._layout.places)
        self.workers = [self.workers[each] for each in order]
        self._layout = self._layout.reordered(order)
        self._collect([worker.update_env_vars.remote(dict(variables)) for worker in self.workers])
        shares_gpus = self._strategy.resources.gpus > 0
        job.begin(self._call, self._layout, Options(settings.timeout_s, given, settings.interfaces(), shares_gpus))
        self._collect([worker.start_executable.remote(*executable) for worker in self.workers])

    def _call(self, rank: int, func: Callable[..., Any], *arguments: Any) -> Any:
        return self.workers[rank].call.remote(func, *arguments)

    def submit(self, func: Callable[[Any], Any], rank: int | None = None) -> list[Any]:
        """Submits `func(executable)` to all workers, or one. Returns Ray's references, by rank."""
        self._check_started()
        workers = self.workers if rank is None else [self.workers[rank]]
        return [worker.execute.remote(func) for worker in workers]

    def execute(self, func: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Returns `func(executable)` of all workers, by rank. Raises WorkerError if one of them fails."""
        if not callbacks:
            return self._collect(self.submit(func))
        self._check_started()
        with Reports(callbacks) as reports:
            self._collect([self.workers[0].set_queue.remote(reports.queue)])
            try:
                results = self._collect(self.submit(func), reports.deliver)
            except BaseException:
                # Also what was reported before the failure, such as a checkpoint.
                failures.after_failure(reports.deliver)
                self._forget_queue()
                raise
            reports.deliver()
            self._collect([self.workers[0].set_queue.remote(None)])
        return results

    def _forget_queue(self) -> None:
        """Lets rank 0 report nowhere after a failure: the queue ends, and the next call may have no callbacks."""
        if self._ended is None:
            # A worker that is lost now is named by the next call; the failure of this one is raised.
            with contextlib.suppress(failures.WorkerError):
                self._collect([self.workers[0].set_queue.remote(None)])

    def execute_single(self, func: Callable[[Any], Any]) -> Any:
        """Returns `func(executable)` of rank 0. Raises WorkerError if it fails."""
        return self._collect(self.submit(func, 0))[0]

    def _collect(self, references: Sequence[Any], poll: Callable[[], None] | None = None) -> list[Any]:
        return failures.collected(references, self._layout.places, self._end, poll)

    def _end(self) -> None:
        """Ends all workers after a failure. The sidecars end with the processes that started them."""
        self._ended = "its workers were ended after a failure"
        self._kill()

    def _kill(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(worker, no_restart=True)

    def _check_started(self) -> None:
        if not self.workers:
            raise RuntimeError("the executor has no workers; call start() first")
        if self._ended is not None:
            raise RuntimeError(f"the executor cannot be used any more: {self._ended}; call shutdown(), then start()")

    def shutdown(self) -> None:
        """Ends the workers' sessions, the sidecars and the workers, and gives the places back."""
        if self.workers and self._ended is None:
            leaving = [worker.call.remote(sidecars.leave) for worker in self.workers]
            # Workers that have ended, or are busy, do not leave; they are ended below.
            ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_TIMEOUT_S)
        self._kill()
        self.workers = []
        self._strategy.shutdown()
