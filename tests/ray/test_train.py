"""Ray Train and Ray Tune on ronde, and the examples, compared with one process that computes the same."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest import ROOT
from ronde.errors import RondeError

if TYPE_CHECKING:
    import torch

EXAMPLES = ROOT / "sdk-python" / "examples"
# In float64. Training on half of the data is far off.
DISTANCE_MAX = 1e-9
TIMEOUT_S = 240


def example(folder: pathlib.Path, cluster: Any, *arguments: str) -> dict[str, torch.Tensor]:
    """Runs the example on the cluster, and returns the weights of rank 0."""
    import torch

    weights = folder / "weights.pt"
    weights.unlink(missing_ok=True)
    variables = {**os.environ, "RAY_ADDRESS": cluster.address, "DIGITS_WEIGHTS": str(weights)}
    command = [sys.executable, str(EXAMPLES / "ray_digits.py"), *arguments]
    done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return dict(torch.load(weights, weights_only=True))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    import torch

    flat = [torch.cat([weights[name].flatten() for name in sorted(one)]) for weights in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


@pytest.fixture(scope="module")
def alone(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    return example(tmp_path_factory.mktemp("alone"), cluster, "--single")


def test_the_example_trains_as_one_process_does(cluster: Any, tmp_path: pathlib.Path, alone: Any) -> None:
    assert distance(alone, example(tmp_path, cluster)) < DISTANCE_MAX


def test_the_example_trains_by_ray_train(cluster: Any, tmp_path: pathlib.Path, alone: Any) -> None:
    assert distance(alone, example(tmp_path, cluster, "--train")) < DISTANCE_MAX


def trained(cluster: Any, folder: pathlib.Path, function: Any, config: Any = None, retries: int = 0) -> Any:
    """Fits a function on two workers of Ray Train."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from ronde.ray.train import RondeConfig

    run = RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=retries))
    return TorchTrainer(
        function,
        train_loop_config=config or {},
        torch_config=RondeConfig(start_timeout_s=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run,
    ).fit()


def listening_sockets() -> int:
    """The number of TCP ports on which this process listens."""
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening.add(f"socket:[{fields[9]}]")
    links = pathlib.Path("/proc/self/fd").iterdir()
    return sum(os.readlink(link) in listening for link in links if link.is_symlink())


def test_ray_train_opens_no_port_for_torch(cluster: Any, tmp_path: pathlib.Path) -> None:
    """A worker of Ray listens already, for Ray. The count is compared with that before the group was made."""

    def train(config: dict[str, str]) -> None:
        import torch
        import torch.distributed as dist

        total = torch.ones(5) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        text = f"{dist.get_backend()} {dist.get_world_size()} {total.tolist()} {os.environ.get('MASTER_ADDR')}"
        pathlib.Path(config["folder"], f"rank-{dist.get_rank()}").write_text(f"{text} {listening_sockets()}")

    def plain(config: dict[str, str]) -> None:
        pathlib.Path(config["folder"], "plain").write_text(str(listening_sockets()))

    from ray.train import RunConfig, ScalingConfig
    from ray.train.backend import BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    config = {"folder": str(tmp_path)}
    DataParallelTrainer(
        plain,
        train_loop_config=config,
        backend_config=BackendConfig(),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(tmp_path / "plain-results")),
    ).fit()
    trained(cluster, tmp_path / "results", train, config)
    ports = (tmp_path / "plain").read_text()
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}").read_text() == f"ronde 2 {[3.0] * 5} None {ports}"


def test_a_worker_that_dies_is_replaced_by_ray_train(cluster: Any, tmp_path: pathlib.Path) -> None:
    def train(config: dict[str, str]) -> None:
        import torch
        import torch.distributed as dist
        from ray.train import report

        # The second report returns when the controller has taken the first one. Until then it waits for the call that
        # starts this function, and it does not try again if a worker dies before the call has returned.
        for _ in range(2):
            report({})
        mark = pathlib.Path(config["mark"])
        for step in range(50):
            if step == 10 and dist.get_rank() == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(5))
        pathlib.Path(config["mark"] + f".{dist.get_rank()}").touch()

    config = {"mark": str(tmp_path / "mark")}
    trained(cluster, tmp_path / "results", train, config, retries=1)
    assert all((tmp_path / f"mark.{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("stage", ["join", "_make_group"])
def test_a_worker_that_dies_at_the_start_is_one_for_ray_train(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Ray Train starts the workers again after RayActorError only. Rank 0 fails because rank 1 has died."""
    import ray
    from ronde.cluster.layout import Place
    from ronde.cluster.sidecars import Served
    from ronde.processes import own_host
    from ronde.ray.train import RondeBackend, RondeConfig

    died = ray.exceptions.ActorDiedError()

    class Workers:
        def __len__(self) -> int:
            return 2

        def execute_single_async(self, rank: int, function: Any, *_: Any) -> Any:
            if function.__name__ == stage:
                peer = RondeError("rank 1 is lost", "rank_lost")
                return died if rank == 1 else ray.exceptions.RayTaskError(stage, "", peer).as_instanceof_cause()
            found = {"describe": Place("ab", "one", own_host(), 0, 1), "start": Served("s", "j", 0, {0: "a", 1: "b"})}
            return [found.get(function.__name__)]

        def execute_async(self, function: Any, *arguments: Any) -> Any:
            return [self.execute_single_async(rank, function, *arguments) for rank in range(2)]

    def get(references: Any) -> Any:
        """A reference is a list with the result, or an exception."""
        if isinstance(references, Exception):
            raise references
        return [get(each) for each in references] if len(references) > 1 else references[0]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references, []))
    with pytest.raises(ray.exceptions.RayActorError) as caught:
        RondeBackend().on_start(Workers(), RondeConfig())
    assert caught.value is died


def test_data_parallel_trainer_without_a_process_group(cluster: Any, tmp_path: pathlib.Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ronde.ray.train import RondeConfig

    def train(config: dict[str, str]) -> None:
        import numpy
        import ronde
        from ronde.without_launcher import settings_without_launcher

        with ronde.connect(**settings_without_launcher({})) as client:
            total = client.allreduce(numpy.ones(3) * (client.rank + 1), op=ronde.Sum)
            pathlib.Path(config["folder"], f"rank-{client.rank}").write_text(str(total.tolist()))
            client.barrier()

    DataParallelTrainer(
        train,
        train_loop_config={"folder": str(tmp_path)},
        backend_config=RondeConfig(process_group=False, start_timeout_s=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "results")),
    ).fit()
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["[3.0, 3.0, 3.0]"] * 2


def test_ronde_config_refuses_other_backends(cluster: Any) -> None:
    from ronde.ray.train import RondeConfig

    with pytest.raises(ValueError, match=r"use ray.train.torch.TorchConfig for backend='gloo'"):
        RondeConfig(backend="gloo")
    with pytest.raises(ValueError, match="init_method='tcp'"):
        RondeConfig(init_method="tcp")
    with pytest.raises(ValueError, match="are both given"):
        RondeConfig(certs="/a", job_secret_file="/b")


def test_tune_trains_each_trial_on_several_workers(cluster: Any, tmp_path: pathlib.Path) -> None:
    import torch
    from ray_tune_digits import search

    found = search(trials=2, slots=2, epochs=3, storage=str(tmp_path))
    assert [result.error for result in found] == [None] * 2
    assert all(result.metrics["size"] == 2 for result in found)
    best = found.get_best_result()
    assert best.metrics["accuracy"] == max(result.metrics["accuracy"] for result in found) > 0.5
    with best.checkpoint.as_directory() as folder:
        assert torch.load(pathlib.Path(folder, "state.pt"), weights_only=True)["epoch"] == 3


def test_a_trial_that_fails_continues_from_its_checkpoint(cluster: Any, tmp_path: pathlib.Path) -> None:
    from ray import tune
    from ronde.ray.tune import DistributedTrainableCreator, report, restored

    def train(config: dict[str, Any]) -> None:
        import tempfile

        import ronde.torch as hvd

        hvd.init()
        with restored() as folder:
            begin = 0 if folder is None else int((folder / "epoch").read_text())
        for epoch in range(begin, 4):
            if epoch == 2 and begin == 0 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()
            with tempfile.TemporaryDirectory() as name:
                pathlib.Path(name, "epoch").write_text(str(epoch + 1))
                report({"epoch": epoch, "begin": begin}, tune.Checkpoint.from_directory(name))

    found = tune.Tuner(
        DistributedTrainableCreator(train, num_slots=2),
        run_config=tune.RunConfig(storage_path=str(tmp_path), failure_config=tune.FailureConfig(max_failures=1)),
    ).fit()
    assert [(result.error, result.metrics["epoch"]) for result in found] == [(None, 3)]
    assert found[0].metrics["begin"] == 2


def test_numbers_of_a_trial_are_checked(cluster: Any) -> None:
    from ronde.ray.tune import DistributedTrainableCreator

    with pytest.raises(ValueError, match="num_slots is 0"):
        DistributedTrainableCreator(print, num_slots=0)
