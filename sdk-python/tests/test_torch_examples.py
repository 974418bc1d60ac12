"""Examples that need PyTorch alone: the backend's name is all that they have of ronde. They match a single process."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from conftest import ronde_binary
from digits_runs import Run, Runner, check_same_training

TIMEOUT_S = 180


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(ronde_binary(), tmp_path_factory.mktemp("runs"), TIMEOUT_S)


@pytest.fixture(scope="module")
def one(runner: Runner) -> Run:
    return runner.alone("ddp_digits.py")


def test_ddp_trains_without_a_listener(runner: Runner, one: Run) -> None:
    check_same_training(runner.job(2, "ddp_digits.py", sidecars=2), one)


def test_fsdp2_trains_without_a_listener(runner: Runner, one: Run) -> None:
    check_same_training(runner.job(2, "fsdp_digits.py", "--tensor", "1"), one)


def test_fsdp2_and_tensor_parallelism_train_without_a_listener(runner: Runner, one: Run) -> None:
    check_same_training(runner.job(4, "fsdp_digits.py", sidecars=2), one)
