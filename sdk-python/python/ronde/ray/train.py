"""`RondeConfig`: Ray Train's workers as the ranks of a job, without the TCP store of PyTorch."""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from ronde.cluster import sidecars
from ronde.cluster.credentials import Credentials, named
from ronde.cluster.layout import Layout
from ronde.cluster.planning import Options
from ronde.errors import RondeError
from ronde.ray import job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = logging.getLogger("ronde.ray")
_BACKEND = "ronde"
# Workers that do not leave in this time are ended by Ray Train without.
_LEAVE_TIMEOUT_S = 10.0
# After a worker has failed to make the group, for Ray to find that another one has ended.
_GRACE_S = 5.0


@dataclass
class RondeConfig(TorchConfig):  # type: ignore[misc]
    """Lets the workers of Ray Train communicate through ronde: one sidecar on each node, and no open port in workers.

        TorchTrainer(train, torch_config=RondeConfig(), scaling_config=ScalingConfig(num_workers=4)).fit()
        DataParallelTrainer(train, backend_config=RondeConfig(process_group=False), ...)

    process_group   -- whether the default process group of torch.distributed is made, with the backend "ronde"; without
                       it the function calls `hvd.init()` of `ronde.torch`, `ronde.connect()` or the like
    timeout_s       -- after which an operation of that group fails
    start_timeout_s -- for workers to answer, and for sidecars to reach each other
    job_secret_file, certs -- for several nodes: as for `RayExecutor.create_settings`
    nics            -- the networks that sidecars listen on, such as "eth0,10.0.0.0/8"; default: all

    A worker that dies, even while the job starts, fails the collectives of the others, and the run; Ray Train's
    `FailureConfig` starts it again.
    Raises ValueError for another `backend` or `init_method`.
    """

    backend: str | None = None
    process_group: bool = True
    start_timeout_s: float = 30
    job_secret_file: str | None = None
    certs: str | None = None
    nics: str | None = None

    def __post_init__(self) -> None:
        """Checks the settings, and takes those that the driver's variables name."""
        if self.backend not in (None, _BACKEND) or self.init_method != "env":
            raise ValueError(
                f"RondeConfig has the backend {_BACKEND!r} and no init_method; use ray.train.torch.TorchConfig for "
                f"backend={self.backend!r}, init_method={self.init_method!r}"
            )
        self.backend = _BACKEND
        given = named(self.certs, self.job_secret_file)
        self.certs, self.job_secret_file = given.certs, given.secret_file

    @property
    def backend_cls(self) -> type[Backend]:
        """The class whose methods Ray Train calls."""
        return RondeBackend

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings for Ray's dashboard."""
        return {"backend": _BACKEND, "process_group": self.process_group, "timeout_s": self.timeout_s}


class RondeBackend(Backend):  # type: ignore[misc]
    """Begins and ends the job of a group of Ray Train's workers."""

    share_cuda_visible_devices: bool = True

    def on_start(self, worker_group: Any, backend_config: RondeConfig) -> None:
        """Starts the sidecars, and the process group.

        Raises RayActorError if a worker has ended, for which Ray Train starts all workers again; otherwise RondeError,
        and what making the group raises.
        """
        try:
            self._begin(worker_group, backend_config)
            return
        except RondeError as error:
            if not isinstance(error.__cause__, ray.exceptions.RayActorError):
                raise
            _log.warning("the job of Ray Train's workers has not started: %s", error)
            ended = error.__cause__
        # Not within the handler above, where each of the two errors would be the other one's cause.
        raise ended

    def _begin(self, worker_group: Any, backend_config: RondeConfig) -> None:
        def call(rank: int, func: Callable[..., Any], *arguments: Any) -> Any:
            return worker_group.execute_single_async(rank, func, *arguments)

        count, timeout = len(worker_group), backend_config.start_timeout_s
        layout = Layout(job.places(call, count, timeout))
        given = Credentials(backend_config.certs, backend_config.job_secret_file)
        job.begin(call, layout, Options(timeout, given, backend_config.nics or ""))
        if backend_config.process_group:
            # Ranks wait for each other as long as `ronde.connect` does, which then names those that are missing.
            _finish(worker_group.execute_async(_make_group, float(backend_config.timeout_s)))

    def on_shutdown(self, worker_group: Any, backend_config: RondeConfig) -> None:
        """Ends the group and the sidecars."""
        del backend_config
        leaving = worker_group.execute_async(_leave)
        _, missing = ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_TIMEOUT_S)
        if missing:
            _log.warning(
                "%d of %d workers have not left the job within %.0f s; Ray ends them",
                len(missing), len(leaving), _LEAVE_TIMEOUT_S,
            )  # fmt: skip


def _finish(references: Sequence[Any]) -> None:
    """Waits for calls on all workers. Raises RayActorError if a worker has ended, otherwise the first failure."""
    try:
        ray.get(references)
    except ray.exceptions.RayTaskError as error:
        # It may have failed because another worker has ended.
        _, missing = ray.wait(references, num_returns=len(references), timeout=_GRACE_S)
        if (found := job.lost(references, missing)) is not None:
            raise found[1] from error
        raise


def _make_group(timeout_s: float) -> None:
    import torch.distributed

    import ronde.torch.distributed

    if not torch.distributed.is_initialized():
        ronde.torch.distributed.init_process_group(datetime.timedelta(seconds=timeout_s))


def _leave() -> None:
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sidecars.leave()
