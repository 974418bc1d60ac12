"""`torch.distributed` on ronde, in worlds of real workers. The scripts in `workers/` assert."""

from __future__ import annotations

import datetime
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Callable

import pytest
from conftest import PACKAGE, WORKERS, WORLD_TIMEOUT_S, ronde_binary

pytest.importorskip("torch")


class _OnGpu:
    """A fake GPU tensor, so that the test runs on machines without GPUs."""

    is_cuda, device, layout, nbytes = True, "cuda:0", None, 0


class _Done:
    """A request that is complete."""

    def poll(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None


def test_results_on_gpus_are_there_when_an_operation_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes them waits for its stream first; so does the one that begins, for what it has begun."""
    import torch

    from ronde.torch.distributed.base import GroupBase
    from ronde.torch.distributed.progress import Completer

    class Completions:
        def wait(self, seen: int, timeout: float) -> int:
            time.sleep(min(timeout, 0.01))
            return seen

        def wake(self) -> None:
            pass

    class Ranks:
        def meet(self, deadline: float) -> None:
            pass

    seen: list[tuple[str, int]] = []
    operations: list[Any] = []

    class Stream:
        def synchronize(self) -> None:
            assert not any(operation.is_done for operation in operations)
            seen.append(("synchronized", threading.get_ident()))

    def start(name: str | None, notify: bool) -> Any:
        seen.append(("submitted", threading.get_ident()))
        return _Done()

    def finish(result: Any) -> None:
        seen.append(("written", threading.get_ident()))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    group: Any = GroupBase()
    completer = Completer(Completions())  # type: ignore[arg-type]
    try:
        group._begin_group(Ranks(), "label", datetime.timedelta(seconds=60), completer)
        operations.append(group._begin("allgather", start, None, [_OnGpu()], finish))
        until = time.monotonic() + 30
        while not operations[0].is_done:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        completer.close()
    assert operations[0].exception() is None
    assert [what for what, _ in seen] == ["synchronized", "submitted", "written", "synchronized"]
    here = threading.get_ident()
    assert [thread == here for _, thread in seen] == [True, True, False, False]


@pytest.mark.parametrize(
    ("ranks", "sidecars", "way"), [(1, 1, ""), (2, 1, "rendezvous"), (3, 2, ""), (4, 2, "rendezvous")]
)
def test_collectives_of_torch_distributed(world: Callable[..., str], ranks: int, sidecars: int, way: str) -> None:
    assert world("c10d.py", ranks, sidecars, *way.split()).count("all collectives are right") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 1)])
def test_ddp_trains_as_one_process_does(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("ddp.py", ranks, sidecars).count("the same as one process") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_results_are_written_in_order_and_in_time(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_works.py", ranks, sidecars, "ronde").count("results come in order") == ranks


def test_the_order_of_results_matches_gloo(world: Callable[..., str], tmp_path: pathlib.Path) -> None:
    assert world("c10d_works.py", 2, 1, "gloo", str(tmp_path / "store")).count("results come in order") == 2


def test_sizes_that_differ_between_ranks_are_errors(world: Callable[..., str]) -> None:
    assert world("c10d_sizes.py", 2, 2).count("sizes are compared") == 2


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 2)])
def test_types_shapes_and_hooks(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_types.py", ranks, sidecars).count("all types are right") == ranks


@pytest.mark.parametrize(("sidecars", "way"), [(1, ""), (2, "ronde")])
def test_groups_are_made_by_their_members(world: Callable[..., str], sidecars: int, way: str) -> None:
    assert world("c10d_groups.py", 4, sidecars, *way.split()).count("all groups are right") == 4


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_what_pytorch_builds_on_groups(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_features.py", ranks, sidecars).count("all features work") == ranks


def test_workers_open_no_socket_of_the_network(world: Callable[..., str]) -> None:
    assert world("c10d_sockets.py", 2, 2).count("no socket of the network") == 2


def test_gloo_keeps_the_store_of_pytorch_in_the_same_process(world: Callable[..., str]) -> None:
    assert world("c10d_sockets.py", 2, 1, "gloo").count("no socket of the network") == 2


@pytest.mark.parametrize(
    ("scheme", "size", "backend"),
    [("file", 2, "ronde"), ("tcp", 3, "ronde"), ("env", 2, "cpu:ronde"), ("file", 1, "ronde")],
)
def test_ranks_meet_by_the_means_of_pytorch(tmp_path: pathlib.Path, scheme: str, size: int, backend: str) -> None:
    """Processes that no launcher of ronde started share one sidecar."""
    ronde_binary()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    method = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{port}", "env": "env://"}[scheme]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_RANK", "RONDE_JOB"))}
    environment = {**kept, "PYTHONPATH": str(PACKAGE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    commands = [
        [sys.executable, str(WORKERS / "c10d_stores.py"), str(rank), str(size), method, backend] for rank in range(size)
    ]
    ranks = [
        subprocess.Popen(each, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for each in commands
    ]
    try:
        outputs = [each.communicate(timeout=WORLD_TIMEOUT_S)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0] * size, outputs
    assert all("the ranks have met" in output for output in outputs), outputs
