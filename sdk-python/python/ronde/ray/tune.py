"""Trials of Ray Tune that train on several workers each: `DistributedTrainableCreator`.

from ronde.ray.tune import DistributedTrainableCreator, report

def train(config):
    hvd.init()
    for epoch in range(config["epochs"]):
        ...
        report({"loss": loss})

tune.Tuner(DistributedTrainableCreator(train, num_slots=2), param_space={"epochs": 3}).fit()
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ray import tune

from ronde.ray import worker
from ronde.ray.executor import RayExecutor
from ronde.ray.strategy import resources_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Files = dict[str, bytes]


class _Report(NamedTuple):
    """What rank 0 reports: the metrics, and the files of a checkpoint."""

    metrics: dict[str, Any]
    files: Files | None


class _Restored:
    """The files of the checkpoint with which this worker's trial continues."""

    files: Files | None = None


_restored = _Restored()


def report(metrics: Mapping[str, Any], checkpoint: tune.Checkpoint | None = None) -> None:
    """Reports metrics of a trial, and a checkpoint; all ranks may call it, and only rank 0's values count.

    metrics    -- such as {"loss": 0.1}
    checkpoint -- a directory on this worker's node (`tune.Checkpoint.from_directory`). Its files go to the trial's
                  actor over Ray, and from there to Ray's storage
    """
    if os.environ.get("RONDE_RANK", "0") == "0":
        worker.log(_Report(dict(metrics), None if checkpoint is None else _files(checkpoint)))


@contextlib.contextmanager
def restored() -> Iterator[pathlib.Path | None]:
    """Yields a directory with the files of the checkpoint with which the trial continues; None at its beginning."""
    if _restored.files is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ronde-checkpoint-") as name:
        _write(_restored.files, pathlib.Path(name))
        yield pathlib.Path(name)


def DistributedTrainableCreator(  # noqa: N802 -- Ray's name
    func: Callable[[dict[str, Any]], Any],
    use_gpu: bool = False,
    num_hosts: int = 1,
    num_slots: int = 1,
    num_cpus_per_slot: float = 1,
    num_gpus_per_slot: float | None = None,
    timeout_s: float = 30,
    *,
    job_secret_file: str | None = None,
    certs: str | None = None,
) -> Callable[[dict[str, Any]], None]:
    """Returns a trainable for Ray Tune that calls `func(config)` on the ranks of a job, for each trial.

    func                                 -- calls `hvd.init()`, and `ronde.ray.tune.report` instead of `tune.report`
    num_hosts, num_slots                 -- ranks of a trial: so many on each of so many hosts
    use_gpu                              -- whether ranks have GPUs
    num_cpus_per_slot, num_gpus_per_slot -- CPUs and GPUs for each rank
    timeout_s, job_secret_file, certs    -- as for `RayExecutor.create_settings`

    Raises ValueError for numbers below 1.
    """
    for name, number in (("num_hosts", num_hosts), ("num_slots", num_slots)):
        if number < 1:
            raise ValueError(f"{name} is {number}; it is at least 1")
    settings = RayExecutor.create_settings(timeout_s, job_secret_file=job_secret_file, certs=certs)

    def trial(config: dict[str, Any]) -> None:
        executor = RayExecutor(settings, num_hosts * num_slots, None, 1, num_cpus_per_slot, use_gpu, num_gpus_per_slot)
        checkpoint = tune.get_checkpoint()
        files = None if checkpoint is None else _files(checkpoint)
        executor.start()
        try:
            executor.run(_run, args=[func, config, files], callbacks=[_forward])
        finally:
            executor.shutdown()

    bundle = resources_of(num_cpus_per_slot, use_gpu, num_gpus_per_slot).bundle(num_slots)
    # The trial itself needs no processor: it waits for its workers.
    places = tune.PlacementGroupFactory(
        [{}, *[bundle] * num_hosts], strategy="STRICT_SPREAD" if num_hosts > 1 else "PACK"
    )
    made: Callable[[dict[str, Any]], None] = tune.with_resources(trial, places)
    return made


def _run(func: Callable[[dict[str, Any]], Any], config: dict[str, Any], files: Files | None) -> None:
    _restored.files = files
    func(config)


def _forward(value: Any) -> None:
    """Passes a report of rank 0 on to Ray Tune, in the trial's actor."""
    if not isinstance(value, _Report):
        return
    if value.files is None:
        tune.report(value.metrics)
        return
    with tempfile.TemporaryDirectory(prefix="ronde-checkpoint-") as name:
        _write(value.files, pathlib.Path(name))
        tune.report(value.metrics, checkpoint=tune.Checkpoint.from_directory(name))


def _files(checkpoint: tune.Checkpoint) -> Files:
    with checkpoint.as_directory() as name:
        folder = pathlib.Path(name)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _write(files: Files, folder: pathlib.Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
