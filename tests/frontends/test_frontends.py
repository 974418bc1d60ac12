"""Front ends of PyTorch train on ronde, as one process does, and no worker listens on a TCP port.

Each example runs unchanged. It has the name "ronde" in one place, or nowhere: then RONDE_AUTOINIT=1 names it.
"""

from __future__ import annotations

import pathlib
import sys
from typing import TYPE_CHECKING

import pytest
from digits_runs import EXAMPLES, WATCHED, check_same_training

if TYPE_CHECKING:
    from digits_runs import Runner

WORKERS = pathlib.Path(__file__).parent / "workers"


@pytest.mark.parametrize("strategy", ["ronde", "horovod"])
def test_lightning(runner: Runner, strategy: str) -> None:
    one = runner.alone("lightning_digits.py", "--strategy", strategy)
    check_same_training(runner.job(2, "lightning_digits.py", "--strategy", strategy, sidecars=2), one)


def test_lightnings_strategies_keep_their_contract(runner: Runner) -> None:
    """Accumulation, clipping, schedulers, collectives, and arguments that contradict the job."""
    run = runner.launched(2, [str(WATCHED), str(WORKERS / "lightning_contract.py")])
    assert run.listeners == [0, 0]


def test_lightnings_own_ddp_opens_gloo_beside_ronde(runner: Runner) -> None:
    """The limit that docs/PYTORCH.md states, and the proof that the watch finds a listener."""
    run = runner.launched(2, [str(WATCHED), str(WORKERS / "lightning_plain.py")], RONDE_AUTOINIT="1")
    assert min(run.listeners) > 0


def test_accelerate(runner: Runner) -> None:
    one = runner.alone("accelerate_digits.py")
    check_same_training(runner.job(2, "accelerate_digits.py", RONDE_AUTOINIT="1"), one)


def test_accelerate_launch(runner: Runner) -> None:
    """`accelerate launch` starts a process of its own in each rank of the job."""
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    program = [str(WATCHED), str(EXAMPLES / "accelerate_digits.py")]
    run = runner.launched(2, [*launch, *program], RONDE_AUTOINIT="1")
    assert len(run.listeners) == 2
    check_same_training(run, runner.alone("accelerate_digits.py"))


def test_transformers_trainer(runner: Runner) -> None:
    one = runner.alone("transformers_digits.py")
    check_same_training(runner.job(2, "transformers_digits.py", RONDE_AUTOINIT="1"), one)


@pytest.mark.parametrize("stage", ["1", "2"])
def test_deepspeed(runner: Runner, stage: str) -> None:
    # ninja is a program of this environment.
    path = f"{pathlib.Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    variables = {"DS_ACCELERATOR": "cpu", "PATH": path}
    one = runner.job(1, "deepspeed_digits.py", "--stage", stage, **variables)
    check_same_training(runner.job(2, "deepspeed_digits.py", "--stage", stage, **variables), one)
