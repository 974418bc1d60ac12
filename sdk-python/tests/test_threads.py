"""Several ranks in one process: threads with a client each. `workers/thread_ranks.py` asserts."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import PACKAGE, WORKERS, ronde_binary

TIMEOUT_S = 180


def threads(what: str, folder: pathlib.Path, **variables: str) -> str:
    """Runs threads as ranks in a process without a launcher."""
    inherited = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    environment = {**inherited, "RONDE_BIN": ronde_binary(), "PYTHONPATH": str(PACKAGE), "TMPDIR": str(folder)}
    command = [sys.executable, str(WORKERS / "thread_ranks.py"), what]
    environment.update(variables)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_threads_with_a_client_each_are_ranks(tmp_path: pathlib.Path, ranks: int) -> None:
    assert f"{ranks} threads with a client each: collectives hold" in threads(str(ranks), tmp_path)


def test_a_second_rank_of_pytorch_in_a_process_is_refused(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    assert "a process has one rank of torch.distributed" in threads("torch", tmp_path, RONDE_START_TIMEOUT="15")
