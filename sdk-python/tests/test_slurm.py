"""Training by `srun` on a real Slurm of one node. `make deploy-test` installs and runs it, `make test` does not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import PACKAGE, ronde_binary
from slurm_node import slurm_node
from test_launchers import without_jobs

from ronde import _ronde

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

if os.environ.get("RONDE_TEST_SLURM") != "1":
    pytest.skip(
        "LEFT OUT: it starts a Slurm and takes two minutes; `make deploy-test` runs it (RONDE_TEST_SLURM=1)",
        allow_module_level=True,
    )
pytest.importorskip("torch")
TIMEOUT_S = 150
TRAIN = """
import os, torch
import ronde.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(5):
    loss = (model(torch.randn(8, 4)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None])
same = all(torch.equal(weights[0], each) for each in weights)
os.write(1, f"rank {hvd.rank()} of {hvd.size()}, the same weights on all: {same}{os.linesep}".encode())
hvd.barrier()
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """Variables of a running Slurm."""
    with slurm_node() as variables:
        yield variables


def srun(
    slurm: dict[str, str], folder: pathlib.Path, options: list[str], command: list[str], **more: str
) -> subprocess.Popen[str]:
    environment = {**without_jobs(), **slurm, "RONDE_BIN": ronde_binary(), "PYTHONPATH": str(PACKAGE)}
    environment.update(more, TMPDIR=str(folder), OMP_NUM_THREADS="1")
    words = ["srun", "--time=3", *options, *command]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, out, errors


def test_srun_trains(slurm: dict[str, str], tmp_path: pathlib.Path) -> None:
    status, out, errors = finished(srun(slurm, tmp_path, ["-n", "4"], [sys.executable, "-c", TRAIN]))
    assert status == 0, out + errors
    assert sorted(out.splitlines()) == [f"rank {rank} of 4, the same weights on all: True" for rank in range(4)]
    assert not list(tmp_path.glob("ronde-*")), "the sidecar and its directory are gone"


def test_srun_with_pmi2_trains(slurm: dict[str, str], tmp_path: pathlib.Path) -> None:
    """Its variables of PMI are there, too; those of the step count."""
    status, out, errors = finished(srun(slurm, tmp_path, ["-n", "2", "--mpi=pmi2"], [sys.executable, "-c", TRAIN]))
    assert status == 0, out + errors
    assert sorted(out.splitlines()) == [f"rank {rank} of 2, the same weights on all: True" for rank in range(2)]


def test_two_steps_at_a_time_do_not_mix(slurm: dict[str, str], tmp_path: pathlib.Path) -> None:
    steps = [srun(slurm, tmp_path, ["-n", "2"], [sys.executable, "-c", TRAIN]) for _ in range(2)]
    for status, out, errors in map(finished, steps):
        assert status == 0, out + errors
        assert sorted(out.splitlines()) == [f"rank {rank} of 2, the same weights on all: True" for rank in range(2)]


def test_the_environment_of_a_step(slurm: dict[str, str], tmp_path: pathlib.Path) -> None:
    """What the table reads from it."""
    status, out, errors = finished(srun(slurm, tmp_path, ["-n", "2", "--label"], ["env"]))
    assert status == 0, errors
    lines = [line.partition(": ")[2] for line in out.splitlines() if line.startswith("1: ") and "=" in line]
    launched = _ronde.LaunchedBy.detect(dict(line.split("=", 1) for line in lines))
    assert launched is not None
    assert (launched.launcher, launched.rank, launched.size) == ("srun", 1, 2)
    assert (launched.local_rank, launched.local_size, launched.node, launched.nodes) == (1, 2, 0, 1)
    assert launched.hosts == [os.uname().nodename.partition(".")[0]]
    assert launched.job is not None
    assert launched.is_on_one_host()


def test_a_task_that_fails_ends_the_step(slurm: dict[str, str], tmp_path: pathlib.Path) -> None:
    """The others report the rank, and nothing hangs."""
    script = f"import os\nif os.environ['SLURM_PROCID'] == '1': os._exit(3)\n{TRAIN}"
    process = srun(slurm, tmp_path, ["-n", "2"], [sys.executable, "-c", script], RONDE_START_TIMEOUT="5")
    status, _, errors = finished(process)
    assert status != 0
    assert "rank 1 of 2 did not come within 5 s" in errors
