"""Front ends of PyTorch train on ronde, as one process does, and no worker listens on a TCP port.

Each example runs unchanged. It has the name "ronde" in one place, or nowhere: then RONDE_AUTOINIT=1 names it.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import TYPE_CHECKING

import pytest
from coverage_names import check_imports
from digits_runs import EXAMPLES, JOB_ALONE, WATCHED, check_same_training

if TYPE_CHECKING:
    from digits_runs import Runner

WORKERS = pathlib.Path(__file__).parent / "workers"


@pytest.mark.parametrize("strategy", ["ronde", "horovod"])
def test_lightning(runner: Runner, strategy: str) -> None:
    one = runner.alone("lightning_digits.py", "--strategy", strategy)
    check_same_training(runner.job(2, "lightning_digits.py", "--strategy", strategy, sidecars=2), one)


@pytest.mark.parametrize("strategy", ["ronde", "horovod"])
def test_lightning_where_only_the_session_knows_the_size(runner: Runner, strategy: str) -> None:
    """As in Slurm, Kubernetes and compose. Each rank would train alone on all data, if it took the variables' word."""
    program = [str(EXAMPLES / "lightning_digits.py"), "--strategy", strategy]
    run = runner.launched(2, [str(JOB_ALONE), str(WATCHED), *program])
    check_same_training(run, runner.alone("lightning_digits.py", "--strategy", strategy))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, 1, 0)),
        ({"RONDE_SOCKET": "/s", "RONDE_JOB": "j", "RONDE_RANK": "1"}, None),
        # srun starts the workers of the script for Slurm.
        ({"RONDE_JOB": "j", "RONDE_RANK": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, None),
        ({"RONDE_SOCKET": "/s"}, None),
    ],
)
def test_the_place_is_that_of_the_environment_or_of_the_session(
    variables: dict[str, str], expected: tuple[int, ...] | None
) -> None:
    from ronde.lightning.environment import place

    assert place(variables) == expected


def test_lightning_refuses_a_session_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from ronde.errors import RondeError
    from ronde.lightning import RondeEnvironment

    for name in [name for name in os.environ if name.startswith("RONDE_")]:
        monkeypatch.delenv(name)
    alone = RondeEnvironment()
    alone.check(0, 1)
    with pytest.raises(RondeError, match=r"gives rank 0 of 1, .* but its session is rank 1 of 2"):
        alone.check(1, 2)


def test_lightnings_strategies_keep_their_contract(runner: Runner) -> None:
    """Accumulation, clipping, schedulers, collectives, and arguments that contradict the job."""
    run = runner.launched(2, [str(WATCHED), str(WORKERS / "lightning_contract.py")])
    assert run.listeners == [0, 0]


def test_lightnings_own_ddp_opens_gloo_beside_ronde(runner: Runner) -> None:
    """The limit that docs/LIGHTNING.md states, and the proof that the watch finds a listener."""
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


def test_torchrun(runner: Runner) -> None:
    """Rank 0 starts the sidecar."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = runner.by_other_launcher([*launch, str(WATCHED), str(EXAMPLES / "accelerate_digits.py")], RONDE_AUTOINIT="1")
    assert (len(run.digests), len(set(run.digests)), len(run.listeners)) == (2, 1, 2)
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


def test_names_of_the_page_of_coverage_are_there() -> None:
    check_imports("ronde.lightning")
