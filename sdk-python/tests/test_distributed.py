"""`torch.distributed` on ronde, in worlds of real workers. The scripts in `workers/` assert."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import subprocess
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any, Callable

import pytest
from conftest import PACKAGE, WORKERS, WORLD_TIMEOUT_S, ronde_binary
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class _Streams:
    """Replaces `torch.cuda`, and records what is ordered after what, and in which thread."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self._current = threading.local()

    def note(self, what: str) -> None:
        self.seen.append((what, threading.get_ident()))

    def current_stream(self, device: Any) -> Any:
        return getattr(self._current, "stream", None) or _Stream(self, "caller")

    def make(self, device: Any) -> Any:
        return _Stream(self, "finishing")

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        self._current.stream = stream
        yield
        self._current.stream = None


class _Stream:
    def __init__(self, streams: _Streams, name: str) -> None:
        self._streams, self._name = streams, name

    def record_event(self) -> Any:
        self._streams.note(f"event of {self._name}")
        return _Event(self._streams, self._name)

    def wait_event(self, event: Any) -> None:
        self._streams.note(f"{self._name} after {event.of}")

    def synchronize(self) -> None:
        self._streams.note(f"host after {self._name}")


class _Event:
    def __init__(self, streams: _Streams, of: str) -> None:
        self._streams, self.of = streams, of

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._streams.note(f"host after {self.of}")


class _NoRanks:
    def meet(self, deadline: float) -> None:
        pass


class _NoCompletions:
    def wait(self, seen: int, timeout: float) -> int:
        time.sleep(min(timeout, 0.01))
        return seen

    def wake(self) -> None:
        pass


@pytest.mark.parametrize(("is_by_torch", "is_future"), [(False, False), (False, True), (True, False)])
def test_streams_are_ordered_around_operations_on_gpus(
    monkeypatch: pytest.MonkeyPatch, is_by_torch: bool, is_future: bool
) -> None:
    """Results are written after what the beginning thread has begun, and used after they are written.

    Where PyTorch copies, both threads wait for their streams. Else no thread waits for a stream.
    """
    import torch

    from ronde.torch.distributed import streams
    from ronde.torch.distributed.base import GroupBase
    from ronde.torch.distributed.progress import Completer

    fake = _Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "Stream", fake.make)
    monkeypatch.setattr(torch.cuda, "stream", fake.use)
    monkeypatch.setattr(streams, "_finishing", {})
    monkeypatch.setattr(streams, "is_copied_by_torch", lambda: is_by_torch)

    def start(name: str | None, notify: bool) -> Any:
        fake.note("submitted")
        return _Done()

    group: Any = GroupBase()
    completer = Completer(_NoCompletions())  # type: ignore[arg-type]
    try:
        group._begin_group(_NoRanks(), "label", datetime.timedelta(seconds=60), completer)
        operation = group._begin("allgather", start, None, [_OnGpu()], lambda result: fake.note("written"))
        until = time.monotonic() + 30
        while not operation.is_done:
            assert time.monotonic() < until
            time.sleep(0.01)
        there = {thread for what, thread in fake.seen if what == "written"}
        if is_future:
            operation.get_future().wait()
        else:
            operation.wait()
    finally:
        completer.close()
    written = ["event of caller", "submitted", "finishing after caller", "written", "event of finishing"]
    used = ["host after finishing"] if is_future else ["caller after finishing"]
    waited = ["host after caller", "submitted", "written", "host after caller"]
    assert [what for what, _ in fake.seen] == (waited if is_by_torch else [*written, *used])
    assert threading.get_ident() not in there, "another thread wrote the results"


@pytest.mark.parametrize(
    ("ranks", "sidecars", "way"),
    [(1, 1, ""), (2, 1, "rendezvous"), (3, 2, ""), pytest.param(4, 2, "rendezvous", marks=pytest.mark.heavy)],
)
def test_collectives_of_torch_distributed(world: Callable[..., str], ranks: int, sidecars: int, way: str) -> None:
    assert world("c10d.py", ranks, sidecars, *way.split()).count("all collectives are right") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), pytest.param(3, 1, marks=pytest.mark.heavy)])
def test_ddp_trains_as_one_process_does(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("ddp.py", ranks, sidecars).count("the same as one process") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.heavy)])
def test_hooks_of_models_whose_groups_are_some_ranks(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("ddp_groups.py", ranks, sidecars).count("hooks are those of their groups") == ranks


def test_a_session_that_continues_with_fewer_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is to begin or has begun: groups of torch.distributed have a fixed size."""
    from ronde.frameworks import basics
    from ronde.torch.distributed import creation

    monkeypatch.setenv("RONDE_ELASTIC", "1")
    with pytest.raises(ValueError, match=r"on_failure=.continue. is for operations of ronde.torch"):
        creation.begun({"on_failure": "continue"})
    monkeypatch.setenv("RONDE_ON_FAILURE", "continue")
    with pytest.raises(ValueError, match="Leave it out, and RONDE_ON_FAILURE, too"):
        creation.begun({})
    assert not basics.is_initialized()
    monkeypatch.setattr(basics, "is_initialized", lambda: True)
    monkeypatch.setattr(basics, "init", lambda: None)
    monkeypatch.setattr(basics, "client", lambda: types.SimpleNamespace(replay=object()))
    with pytest.raises(ValueError, match=r"hvd\.elastic\.run restores the last commit instead"):
        creation.begun({})


@pytest.mark.parametrize(("ranks", "sidecars"), [pytest.param(2, 1, marks=pytest.mark.heavy), (3, 2)])
def test_results_are_written_in_order_and_in_time(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_works.py", ranks, sidecars, "ronde").count("results come in order") == ranks


def test_the_order_of_results_matches_gloo(world: Callable[..., str], tmp_path: pathlib.Path) -> None:
    assert world("c10d_works.py", 2, 1, "gloo", str(tmp_path / "store")).count("results come in order") == 2


def test_sizes_that_differ_between_ranks_are_errors(world: Callable[..., str]) -> None:
    assert world("c10d_sizes.py", 2, 2).count("sizes are compared") == 2


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.heavy), (3, 2)])
def test_types_shapes_and_hooks(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_types.py", ranks, sidecars).count("all types are right") == ranks


@pytest.mark.parametrize(("sidecars", "way"), [pytest.param(1, "", marks=pytest.mark.heavy), (2, "ronde")])
def test_groups_are_made_by_their_members(world: Callable[..., str], sidecars: int, way: str) -> None:
    assert world("c10d_groups.py", 4, sidecars, *way.split()).count("all groups are right") == 4


@pytest.mark.parametrize(("ranks", "sidecars"), [pytest.param(2, 1, marks=pytest.mark.heavy), (3, 2)])
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
    port = free_port()
    method = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{port}", "env": "env://"}[scheme]
    outputs = without_launcher("c10d_stores.py", size, port, method, backend)
    assert all("the ranks have met" in output for output in outputs), outputs


def test_a_job_of_each_process_is_not_that_of_the_ranks_of_pytorch(tmp_path: pathlib.Path) -> None:
    """Each rank would train alone without a word."""
    outputs = without_launcher("ddp_groups.py", 2, 0, f"file://{tmp_path}/store")
    assert all("hooks are those of their groups" in output for output in outputs), outputs


def without_launcher(script: str, size: int, port: int, *arguments: str) -> list[str]:
    """Runs a script of `workers/` in processes that get their rank and their number, and returns what they print."""
    ronde_binary()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_RANK", "RONDE_JOB"))}
    environment = {**kept, "PYTHONPATH": str(PACKAGE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    commands = [[sys.executable, str(WORKERS / script), str(rank), str(size), *arguments] for rank in range(size)]
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
    return outputs
