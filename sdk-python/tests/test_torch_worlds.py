"""`ronde.torch` in worlds of real workers and sidecars, with Horovod's calls. The scripts in `workers/` assert."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Callable

import pytest
from conftest import PACKAGE, WORKERS, leave_out, ronde_binary

if TYPE_CHECKING:
    from collections.abc import Mapping

torch = pytest.importorskip("torch")

from ronde import staging  # noqa: E402

TIMEOUT_S = 180


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (4, 1), (4, 2)])
def test_collectives_and_gradients(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("torch_collectives.py", ranks, sidecars).count("checks of collectives hold") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (4, 2)])
def test_options_of_the_optimizer(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("torch_optimizer.py", ranks, sidecars).count("checks of the optimizer hold") == ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_process_sets(world: Callable[..., str], ranks: int) -> None:
    assert world("torch_sets.py", ranks, 1).count("process sets hold") == ranks


def test_a_variable_permits_process_sets_that_come_and_go(
    world: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    assert world("torch_sets.py", 2, 1).count("sets are added and removed") == 2


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (4, 1), (4, 2)])
def test_operations_of_process_sets(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("torch_set_operations.py", ranks, sidecars).count("operations of sets hold") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 2), (4, 1)])
def test_errors(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("torch_errors.py", ranks, sidecars).count("errors reach every rank") == ranks


def test_sessions_leak_no_resources(world: Callable[..., str]) -> None:
    assert world("torch_rounds.py", 2, 1).count("leaked no resources") == 2


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (2, 2), (4, 2)])
def test_adasum_by_hosts(world: Callable[..., str], monkeypatch: pytest.MonkeyPatch, ranks: int, sidecars: int) -> None:
    monkeypatch.setenv("RONDE_HIERARCHICAL_ADASUM", "1")
    assert world("torch_hierarchy.py", ranks, sidecars).count("hosts first") == ranks


def test_timelines_by_calls(world: Callable[..., str], tmp_path: pathlib.Path) -> None:
    assert world("torch_timeline.py", 2, 1, str(tmp_path)).count("recorded") == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tensors_on_gpus(world: Callable[..., str]) -> None:
    assert world("torch_cuda.py", 2, 1).count("GPUs hold") == 2


def test_pinned_buffers_are_reused_once_their_copy_is_done() -> None:
    class Copy:
        is_done = False

        def query(self) -> bool:
            return self.is_done

        def synchronize(self) -> None:
            self.is_done = True

    pool = staging.Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), idle_bytes_max=20_000)
    first = pool.lease((3, 5), torch.float64)
    assert first.tensor.shape == (3, 5)
    address, copy = first.tensor.data_ptr(), Copy()
    first.event = copy
    del first
    second = pool.lease((2,), torch.int16)
    assert second.tensor.data_ptr() != address, "its copy is under way"
    copy.is_done = True
    del second
    kept = [pool.lease((), torch.float32), pool.lease((0, 7), torch.float32)]
    assert pool.made == 2
    assert address in [each.tensor.untyped_storage().data_ptr() for each in kept]
    large = pool.lease((5_000,), torch.float64)
    assert pool.made == 3
    large.event = copy = Copy()
    del large
    pool.lease((5_000,), torch.float64)
    assert copy.is_done, "buffers beyond the idle limit are released after their copy"
    assert pool.made == 4


def test_a_crash_is_reported_with_its_last_output() -> None:
    command = [ronde_binary(), "run", "-np", "2", sys.executable, str(WORKERS / "torch_crash.py")]
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert done.returncode != 0
    assert "rank 0 received the reason" in done.stdout, done.stdout + done.stderr
    assert "rank 1 on host localhost exited with code 1" in done.stderr, done.stderr


def by_itself(command: list[str], **variables: str) -> str:
    """Runs a program without a launcher."""
    environment: dict[str, Any] = {**os.environ, **variables, "RONDE_BIN": ronde_binary(), "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def is_anything_left(folder: pathlib.Path) -> bool:
    """Returns whether directories of sidecars remain."""
    return any(folder.glob("ronde-*"))


def test_a_program_without_a_launcher_is_a_job_of_one_rank(tmp_path: pathlib.Path) -> None:
    for worker, output in (("torch_collectives.py", "0 of 1"), ("training.py", "rank 0 of 1")):
        assert output in by_itself([sys.executable, str(WORKERS / worker)], TMPDIR=str(tmp_path))
    # Without `shutdown`, and with a forked child that is there until the program has gone.
    script = "import os, ronde.torch as hvd; hvd.init(); r, w = os.pipe()\n"
    script += "if not os.fork(): os.close(w), os._exit(len(os.read(r, 1)))"
    by_itself([sys.executable, "-c", script], TMPDIR=str(tmp_path))
    assert not is_anything_left(tmp_path)


def test_ranks_match_mpi_under_mpirun(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mpi4py")
    mpirun = pathlib.Path(sys.executable).with_name("mpirun")
    if not mpirun.is_file():
        leave_out("mpi", "there is no mpirun beside this Python; `make setup` installs it")
    allowed: Mapping[str, str] = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed = {**allowed, "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(mpirun), "--oversubscribe", "-np", "4", sys.executable, str(WORKERS / "torch_mpi.py")]
    output = by_itself(command, TMPDIR=str(tmp_path), **allowed)
    assert output.count("communicators hold") == 4, output
    assert not is_anything_left(tmp_path)
