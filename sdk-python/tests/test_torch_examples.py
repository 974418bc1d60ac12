"""Examples that need PyTorch alone. They match a single process."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from conftest import PACKAGE, leave_out, ronde_binary
from digits_runs import DTYPE, EXAMPLES, Run, Runner, check_same_training

TIMEOUT_S = 180
MPIRUN = pathlib.Path(sys.executable).with_name("mpirun")


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


@pytest.mark.parametrize("launcher", ["ronde run", "mpirun"])
def test_a_script_with_horovods_calls_trains_as_one_process(launcher: str, tmp_path: pathlib.Path) -> None:
    """Not as one process for each rank, whichever launcher has started them."""
    if launcher == "mpirun" and not MPIRUN.is_file():
        leave_out("mpi", "there is no mpirun beside this Python; `make setup` installs it")
    commands = {
        "ronde run": [ronde_binary(), "run", "-np", "2", "--sidecars", "2"],
        "mpirun": [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-np", "2"],
    }
    many, one = trained(commands[launcher], tmp_path / "many.json"), trained([], tmp_path / "one.json", "--single")
    assert [each["rank"] for each in many["ranks"]] == [0, 1]
    assert many["digests_equal"]
    assert many["accuracy"] == one["accuracy"] > 0.85
    assert many["epochs"][-1]["loss"] == pytest.approx(one["epochs"][-1]["loss"], rel=1e-6)


def trained(launcher: list[str], report: pathlib.Path, *arguments: str) -> dict[str, Any]:
    """Runs train_digits.py, and returns its report."""
    command = [*launcher, sys.executable, str(EXAMPLES / "train_digits.py"), "--epochs", "3", "--report", str(report)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "RONDE_BIN": ronde_binary(), **DTYPE}
    done = subprocess.run(
        [*command, *arguments], env=environment, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(report.read_text())
    return found
