"""The actor that runs a rank, and the values that it reports to the driver while a function runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import socket
from typing import TYPE_CHECKING, Any, Callable

import ray

from ronde.client import last_rank
from ronde.elastic.membership import is_elastic, worker_number
from ronde.private_folder import PrivateFolder
from ronde.run import dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# In elastic jobs: the folder in which workers leave the values that they report.
REPORTS = "RONDE_RAY_REPORTS"


class _Reports:
    """The queue through which this worker reports to the driver; None if the driver does not take reports.

    numbers -- of the values that this worker of an elastic job leaves for the driver
    """

    queue: Any = None
    numbers = itertools.count(1)


_reports = _Reports()


def configure(queue: Any) -> None:
    """Sets the queue of `log`: one of `ray.util.queue`, or None."""
    _reports.queue = queue


def log(info: Any) -> None:
    """Reports a value, such as a dictionary of metrics, to the callbacks of the driver.

    Only rank 0's values are reported; on other ranks, and without callbacks, this does nothing.
    """
    if is_elastic():
        if last_rank() == 0 and REPORTS in os.environ:
            _leave(info)
    elif _reports.queue is not None and os.environ.get("RONDE_RANK", "0") == "0":
        _reports.queue.put(info)


def _leave(info: Any) -> None:
    """Leaves a value for the driver, in the folder of the call."""
    # Of this value alone: threads may report at the same time.
    number = next(_reports.numbers)
    with contextlib.closing(PrivateFolder(pathlib.Path(os.environ[REPORTS]))) as folder:
        folder.replace(f"value.{worker_number()}.{number}", dumps(info))


class BaseHorovodWorker:
    """A process of a job, as an actor of Ray: `ray.remote(BaseHorovodWorker).remote(world_rank, world_size)`.

    world_rank, world_size -- preliminary numbers; those of the job come with `update_env_vars`

    `RayExecutor` makes one for each rank.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.update_env_vars(
            {"HOROVOD_HOSTNAME": self.node_id(), "HOROVOD_RANK": world_rank, "HOROVOD_SIZE": world_size}
        )

    def node_id(self) -> str:
        """Returns Ray's ID of the node of this worker."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def hostname(self) -> str:
        """Returns the name of this worker's host."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[Any]:
        """Returns the IDs of the GPUs that Ray has given to this worker."""
        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Sets variables in this worker's environment."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Returns the variables of this worker's environment."""
        return dict(os.environ)

    def call(self, func: Callable[..., Any], *arguments: Any) -> Any:
        """Returns `func(*arguments)`."""
        return func(*arguments)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the object that `execute` passes to functions."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Returns `func(executable)`; the executable is None unless `start_executable` has made one."""
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """Sets the queue of `log`."""
        configure(queue)
