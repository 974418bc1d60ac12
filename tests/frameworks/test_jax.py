"""ronde.jax with real processes. The programs of the ranks compare with NumPy, or with JAX in one process."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("jax")

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.append(str(ROOT / "tests" / "product"))

from blocks import Block, blocks  # noqa: E402
from elastic_job import ElasticJob, Hosts  # noqa: E402

WORKERS = pathlib.Path(__file__).parent / "workers"
EXAMPLES = ROOT / "sdk-python" / "examples"
PAGE = blocks("docs/JAX.md", (ROOT / "docs" / "JAX.md").read_text())
TIMEOUT_S = 300


def run(command: list[str], status: int = 0) -> str:
    """Runs a command, and returns what it prints. Fails if its exit status is another one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "sdk-python" / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert done.returncode == status, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def job(program: pathlib.Path, ranks: int, sidecars: int, status: int = 0) -> str:
    """Runs a program as a job."""
    return launched(program, ["-np", str(ranks), "--sidecars", str(sidecars)], status)


def launched(program: pathlib.Path, options: list[str], status: int = 0) -> str:
    """Runs a program by `ronde run` with these options."""
    binary = os.environ.get("RONDE_BIN")
    if not binary or not pathlib.Path(binary).is_file():
        pytest.fail("RONDE_BIN does not name the binary `ronde`; run the tests by `make framework-test`")
    return run([binary, "run", *options, "--start-timeout", "120", sys.executable, str(program)], status)


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.heavy)])
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("jax_collectives.py", "checks passed"),
        pytest.param("jax_transforms.py", "control_flow passed", marks=pytest.mark.heavy),
        ("jax_order.py", "in order"),
        ("jax_errors.py", "after shutdown"),
        pytest.param("jax_training.py", "training passed", marks=pytest.mark.heavy),
    ],
)
def test_ranks_agree_with_one_process(program: str, words: str, ranks: int, sidecars: int) -> None:
    printed = job(WORKERS / program, ranks, sidecars)
    for rank in range(ranks):
        assert re.search(rf"rank {rank} of {ranks}: .*{words}", printed), printed


@pytest.mark.heavy
def test_sessions_after_one_another() -> None:
    printed = job(WORKERS / "jax_sessions.py", 2, 1)
    assert len(re.findall(r"rank [01] of 2: sessions passed", printed)) == 2, printed


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.heavy)])
def test_the_state_of_an_elastic_training(ranks: int) -> None:
    printed = job(WORKERS / "jax_elastic_state.py", ranks, 1)
    assert len(re.findall(rf"rank \d of {ranks}: elastic state passed", printed)) == ranks, printed


@pytest.mark.heavy
def test_an_elastic_training_survives_the_loss_of_a_worker() -> None:
    """Also of that with rank 0: the others have its state. A new worker takes its place."""
    command = [str(EXAMPLES / "jax_elastic_digits.py"), "--epochs", "8", "--pause", "0.1"]
    with ElasticJob(["-np", "2", "--min-np", "1"], command) as running:
        lost = running.await_size(2, 0)
        running.await_text("epoch 1 is complete")
        running.kill(lost.pid)
        running.await_text("continues as rank 0 of")
        reports = running.finish()
    assert reports[0].accuracy > 0.9


@pytest.mark.heavy
def test_an_elastic_training_grows_from_one_worker(tmp_path: pathlib.Path) -> None:
    """Its programs are compiled again for two ranks."""
    hosts = Hosts(tmp_path)
    hosts.set("127.0.0.1:1")
    options = ["-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts.script)]
    command = [str(EXAMPLES / "jax_elastic_digits.py"), "--epochs", "40", "--pause", "0.1", "--pause-below", "2"]
    with ElasticJob(options, command) as running:
        running.await_text("epoch 1 is complete")
        hosts.set("127.0.0.1:2")
        running.await_size(2)
        reports = running.finish()
    assert len(reports) == 2


@pytest.mark.heavy
def test_a_job_continues_without_a_rank_that_dies() -> None:
    printed = launched(WORKERS / "jax_continues.py", ["-np", "3", "--min-np", "2", "--max-np", "3"])
    assert len(re.findall(r"worker [02]: rank [01] of 2 continues", printed)) == 2, printed


@pytest.mark.heavy
def test_an_elastic_training_continues_without_restoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is enough, and the function is called again with its present state and ranks."""
    monkeypatch.setenv("RONDE_ON_FAILURE", "continue")
    printed = launched(WORKERS / "jax_elastic_continues.py", ["-np", "3", "--min-np", "2", "--max-np", "3"])
    assert len(re.findall(r"worker [02]: no step was repeated", printed)) == 2, printed


@pytest.mark.heavy
def test_survivors_of_a_rank_that_dies_get_its_record() -> None:
    printed = job(WORKERS / "jax_dies.py", 3, 2, status=137)
    assert (
        len(re.findall(r"rank [02] knows: LastCall\(collective='allreduce', operation='allreduce.step'", printed)) == 2
    )


@pytest.mark.heavy
def test_the_example_trains_as_one_process() -> None:
    found = r"rank \d+ of \d+: test accuracy ([\d.]+), weights ([0-9a-f]+), norm ([\d.]+)"
    many = re.findall(found, job(EXAMPLES / "jax_digits.py", 2, 2))
    one = re.findall(found, run([sys.executable, str(EXAMPLES / "jax_digits.py")]))
    assert (len(many), len(one)) == (2, 1)
    assert many[0] == many[1], "ranks have different weights"
    assert float(many[0][0]) > 0.9
    assert float(many[0][2]) == pytest.approx(float(one[0][2]), rel=0.01)
    assert float(many[0][0]) == pytest.approx(float(one[0][0]), abs=0.02)


@pytest.mark.heavy
@pytest.mark.parametrize("block", [block for block in PAGE if block.language == "python"], ids=str)
def test_programs_of_the_page(block: Block, tmp_path: pathlib.Path) -> None:
    assert block.file is not None
    program = tmp_path / block.file[0]
    program.write_text(block.text)
    printed = job(program, 2, 1)
    shown = next((other for other in PAGE if other.line > block.line), None)
    assert shown is not None
    assert shown.language == "text", f"{block} shows no output"
    for line in shown.text.splitlines():
        assert line in printed, printed


def test_a_process_alone_is_a_job_of_one_rank() -> None:
    program = (
        "import jax, jax.numpy as jnp, ronde.jax as hvd\n"
        "hvd.init()\n"
        "print(hvd.rank(), hvd.size(), jax.jit(lambda x: hvd.allgather(x))(jnp.arange(2)))\n"
    )
    assert "0 1 [0 1]" in run([sys.executable, "-c", program])


def test_a_session_that_a_function_leaves_open_is_closed() -> None:
    """JAX has a session of its own here. Over two sidecars the result needs another one."""
    program = (
        "import ronde\n"
        "def train():\n"
        "    import jax.numpy as jnp, ronde.jax as hvd\n"
        "    hvd.init()\n"
        "    return int(hvd.allreduce(jnp.array([hvd.rank() + 1]), op=hvd.Sum)[0])\n"
        "print(ronde.run(train, np=2, options=['--sidecars', '2']))\n"
    )
    assert run([sys.executable, "-c", program]) == "[3, 3]\n"


def test_importing_ronde_imports_no_framework() -> None:
    program = "import sys, ronde; print(sorted({'jax', 'torch', 'tensorflow', 'keras'} & set(sys.modules)))"
    assert run([sys.executable, "-c", program]) == "[]\n"
