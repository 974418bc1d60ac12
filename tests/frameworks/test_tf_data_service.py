"""tf.data's service: a compute job and a training job, of real processes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("tensorflow")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Job

ROOT = pathlib.Path(__file__).parent.parent.parent
SDK = ROOT / "sdk-python"
TIMEOUT_S = 300
MODULE = "horovod.tensorflow.data.compute_worker"


@contextlib.contextmanager
def compute_job(config: pathlib.Path, *options: str, ranks: int = 2) -> Iterator[subprocess.Popen[str]]:
    """Runs a compute job until the block ends."""
    launcher = [os.environ["RONDE_BIN"], "run", "-np", str(ranks), "--start-timeout", "120"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{SDK / 'python'}{os.pathsep}{SDK / 'horovod-compat' / 'src'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [*launcher, sys.executable, "-m", MODULE, str(config), *options]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield started
    finally:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.communicate(timeout=60)
        started.kill()


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("shared", []),
        pytest.param("own", ["--dispatchers", "2"], marks=pytest.mark.heavy),
        pytest.param("training", ["--dispatcher-side", "training"], marks=pytest.mark.heavy),
        pytest.param("round_robin", [], marks=pytest.mark.heavy),
        pytest.param("round_robin", ["--dispatchers", "2"], marks=pytest.mark.heavy),
    ],
)
def test_training_gets_what_the_compute_job_computes(
    case: str, options: list[str], job: Job, tmp_path: pathlib.Path
) -> None:
    config = tmp_path / "folder" / "compute.json"
    with compute_job(config, *options) as computes:
        try:
            ranks = 4 if case == "round_robin" and options else 2
            printed = job("tf_data_training.py", ranks, str(config), case)
        except BaseException:
            computes.terminate()
            print(computes.communicate(timeout=60)[0])
            raise
        assert len(re.findall(rf"rank \d of {ranks}: {case} passed", printed)) == ranks
        # Training has shut it down.
        output, _ = computes.communicate(timeout=120)
        assert computes.returncode == 0, output
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert json.loads(config.read_text())["plaintext_network"] is False


@pytest.mark.parametrize(("size", "dispatchers"), [(1, 1), (4, 1), (4, 2), (5, 2), (7, 3), (2, 3)])
def test_consumers_of_a_dispatcher_are_numbered_without_gaps(size: int, dispatchers: int) -> None:
    """A dispatcher waits for all consumers that it expects, so others than its own would never come."""
    from ronde.tensorflow.data.compute_service import consumer_of

    for number in range(dispatchers):
        found = [consumer_of(rank, size, dispatchers) for rank in range(number, size, dispatchers)]
        assert found == [(index, len(found)) for index in range(len(found))]


def test_ranks_are_divided_among_dispatchers_evenly(tmp_path: pathlib.Path) -> None:
    with compute_job(tmp_path / "compute.json", "--dispatchers", "2", ranks=3) as computes:
        output, _ = computes.communicate(timeout=TIMEOUT_S)
    assert computes.returncode != 0
    assert re.search(r"Number of processes \(3\) must be a multiple of number of dispatchers \(2\)", output), output
    assert not (tmp_path / "compute.json").exists()


def test_a_configuration_of_others_is_not_read(tmp_path: pathlib.Path) -> None:
    from ronde.tensorflow.data.compute_service import TfDataServiceConfig

    file = tmp_path / "compute.json"
    with pytest.raises(FileNotFoundError):
        TfDataServiceConfig.read(file)
    config = TfDataServiceConfig(1, 1, "compute", ["localhost:1"], bytes(32))
    config.write(file)
    assert TfDataServiceConfig.read(file) == config
    file.chmod(0o666)
    with pytest.raises(PermissionError, match="others can write it"):
        TfDataServiceConfig.read(file)
    with pytest.raises(ValueError, match="no configuration of a compute job"):
        TfDataServiceConfig.from_dict({"key": 5})
    with pytest.raises(ValueError, match='give "compute" or "training"'):
        TfDataServiceConfig(1, 1, "elsewhere", [], bytes(32))
