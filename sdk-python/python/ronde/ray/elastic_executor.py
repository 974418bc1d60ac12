"""`ElasticRayExecutor`: Horovod's older name for an elastic `RayExecutor`, with its own settings class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from ronde.ray.elastic import ElasticOptions, ElasticWorkers
from ronde.ray.executable import Executable
from ronde.ray.settings import MiniSettings, adopted, discovery_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass
class ElasticSettings(MiniSettings):
    """The settings of an elastic job: those of `MiniSettings`, and its least and most workers.

    min_num_proc, max_num_proc -- the least and the most workers
    reset_limit                -- how often the workers may change
    elastic_timeout            -- seconds to wait for `min_num_proc` workers
    cooldown_range             -- for how many seconds, at least and at most, a node is not used after a failure there
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    cooldown_range: Sequence[int] | None = None


class ElasticRayExecutor:
    """Runs functions as elastic jobs on the nodes of Ray. New programs use `RayExecutor(min_workers=...)`.

    settings                     -- from `create_settings`, or another object with attributes of its names, such as
                                    Horovod's `ElasticSettings`
    use_gpu                      -- whether workers have GPUs
    cpus_per_slot, gpus_per_slot -- CPUs and GPUs for each worker
    env_vars                     -- variables for the workers
    override_discovery           -- whether nodes are those of Ray's table; otherwise those of `settings.discovery`

    Raises ValueError for arguments that contradict each other.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Iterable[str] | str | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Returns settings; `min_np` and `max_np` are older names of `min_num_proc` and `max_num_proc`.

        kwargs -- further fields of `ElasticSettings`, such as `discovery`. Raises TypeError for others.
        """
        given = nics if nics is None or isinstance(nics, str) else tuple(nics)
        return ElasticSettings(
            timeout_s=timeout_s,
            nics=given,
            ssh_identity_file=ssh_identity_file,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            **kwargs,
        )

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot is not None and not use_gpu:
            raise ValueError("gpus_per_slot is set, but use_gpu is not; set use_gpu=True")
        if gpus_per_slot is not None and gpus_per_slot < 1:
            raise ValueError(f"gpus_per_slot is {gpus_per_slot}; it is at least 1: ranks do not share a GPU")
        settings = adopted(settings, ElasticSettings)
        self.settings, self._variables = settings, dict(env_vars or {})
        options = ElasticOptions(
            settings.min_num_proc, settings.max_num_proc, cpus_per_slot, use_gpu, gpus_per_slot, settings.reset_limit
        )
        options.elastic_timeout, options.cooldown_range = settings.elastic_timeout, settings.cooldown_range
        options.discovery = discovery_of(settings, override_discovery)
        self._workers = ElasticWorkers(settings, options)

    def start(self) -> None:
        """Checks that a job can begin. Raises RondeError if nodes are other hosts and Ray has no TLS."""
        self._workers.start(Executable(), self._variables)

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Returns `worker_fn()` of the workers at the end, by rank. As `RayExecutor.run` in an elastic job."""
        return self._workers.execute(lambda _: worker_fn(), callbacks)
