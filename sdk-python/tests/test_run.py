"""Functions on all ranks: `ronde.run` from plain programs, from pytest, and from a `__main__` without a file."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import stat
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from conftest import PACKAGE, ronde_binary

import ronde
from ronde.private_folder import opened
from ronde.run import HEADER, environment

pytest.importorskip("cloudpickle")
if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 180


@pytest.fixture(autouse=True)
def the_binary_is_there() -> None:
    ronde_binary()


def rank_and_sum(base: int, *, factor: int = 1) -> tuple[int, int, int]:
    """A function of an importable module."""
    with ronde.connect() as client:
        total = client.allreduce(numpy.array([base + client.rank]), op=ronde.Sum)
        return client.rank, client.size, int(total[0]) * factor


def test_results_come_in_the_order_of_ranks() -> None:
    results = ronde.run(rank_and_sum, args=(10,), kwargs={"factor": 2}, np=3)
    assert results == [(rank, 3, 66) for rank in range(3)]


def test_closures_and_lambdas_can_be_run() -> None:
    secret = {"seen": [1, 2]}
    assert ronde.run(lambda: (secret, os.environ["RONDE_RANK"])) == [(secret, "0")]


def test_sessions_that_the_function_leaves_open_are_closed() -> None:
    pytest.importorskip("torch")

    def train() -> int:
        import torch

        import ronde.torch as hvd

        hvd.init()
        return int(hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum))

    for hosts in (None, "localhost:2"):
        assert ronde.run(train, np=2, hosts=hosts, options=["--sidecars", "2"]) == [3, 3]


def test_a_session_without_pytorch_that_the_function_leaves_open_is_closed() -> None:
    """The session of TensorFlow, Keras and MXNet. Over two sidecars the result needs a session of its own."""

    def train() -> int:
        from ronde.frameworks import basics

        basics.init()
        assert "ronde.torch" not in sys.modules
        return int(basics.client().allreduce(numpy.array([basics.rank() + 1]), op=ronde.Sum)[0])

    assert ronde.run(train, np=2, options=["--sidecars", "2"]) == [3, 3]


def fail_on_rank_1() -> None:
    rank = int(os.environ["RONDE_RANK"])
    if rank == 1:
        raise KeyError(f"a mistake of rank {rank}")
    # It waits forever, and ends because rank 1 has ended.
    threading.Event().wait(TIMEOUT_S)
    raise AssertionError("nobody ended this rank")


@pytest.mark.parametrize("hosts", [None, "localhost:3"])
def test_an_exception_of_one_rank_is_reported_with_its_traceback(hosts: str | None) -> None:
    with pytest.raises(RuntimeError, match="one or more processes exited with non-zero status") as caught:
        ronde.run(fail_on_rank_1, np=3, hosts=hosts)
    text = str(caught.value)
    assert "rank 1 on host localhost exited with code 1" in text.splitlines()[0]
    assert "Traceback (most recent call last):" in text
    assert "in fail_on_rank_1" in text
    assert text.rstrip().endswith("KeyError: 'a mistake of rank 1'")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: os.kill(os.getpid(), 9), "was killed by signal 9"),
        (lambda: os._exit(0), "ended without a result"),
        (lambda: sys.exit(0), r"ended its process by SystemExit\(0\)"),
        (threading.Lock, "cannot pickle"),
    ],
)
def test_a_rank_without_a_result_is_reported(function: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        ronde.run(function)


def test_errors_before_the_job_are_raised_to_the_caller() -> None:
    with pytest.raises(TypeError, match="pickle"):
        ronde.run(print, args=(threading.Lock(),))
    with pytest.raises(ValueError, match="hosts and hostfile are both given"):
        ronde.run(print, hosts="a:1", hostfile="hosts")
    with pytest.raises(RuntimeError, match="ended with exit code 64 before there was a job"):
        ronde.run(print, np=2, hosts="localhost:1")


def test_the_error_names_cloudpickle_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match="pip install cloudpickle"):
        ronde.run(print)


def test_output_and_folders_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    # It contains sockets, whose paths are short: pytest's own folders may be too deep.
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("TMPDIR", place)
        monkeypatch.setattr("tempfile.tempdir", None)
        folder = pathlib.Path(place)

        def read_modes() -> tuple[int, int]:
            print("hello from the function")
            (call,) = pathlib.Path(os.environ["TMPDIR"]).glob("ronde-call-*")
            return stat.S_IMODE(call.stat().st_mode), stat.S_IMODE((call / "call").stat().st_mode)

        assert ronde.run(read_modes, np=2, output_filename=folder / "out") == [(0o700, 0o600)] * 2
        assert (folder / "out" / "rank.1" / "stdout").read_text() == "hello from the function\n"
        assert not list(folder.glob("ronde-call-*"))


def test_only_a_private_folder_of_this_user_is_trusted(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o700)
    with opened(tmp_path) as folder:
        assert folder is not None
        folder.write("mine", b"content")
        assert folder.read("mine") == b"content"
        (tmp_path / "linked").symlink_to(tmp_path / "mine")
        (tmp_path / "shared").write_bytes(b"")
        (tmp_path / "shared").chmod(0o640)
        for name, reason in (
            ("linked", "symbolic links"),
            ("shared", "it must be private"),
            ("absent", "No such file"),
        ):
            with pytest.raises(OSError, match=reason):
                folder.read(name)
        with pytest.raises(FileExistsError):
            folder.write("linked", b"")
        # Another folder in its place changes nothing.
        tmp_path.rename(tmp_path.with_name("moved"))
        tmp_path.mkdir()
        assert folder.read("mine") == b"content"
    (tmp_path / "link").symlink_to(tmp_path.with_name("moved"))
    for path in (tmp_path / "link", tmp_path / "absent"):
        with opened(path) as folder:
            assert folder is None
    tmp_path.chmod(0o710)
    with opened(tmp_path) as folder:
        assert folder is None


def folder_with_a_call(folder: pathlib.Path, marker: pathlib.Path) -> None:
    """Makes a folder as `ronde.run` does, with a call that makes the folder `marker`."""
    folder.mkdir(mode=0o700)
    path = json.dumps([]).encode()
    call = pickle.dumps((os.mkdir, (str(marker),), {}))
    (folder / "call").write_bytes(HEADER.pack(len(path)) + path + call)
    (folder / "call").chmod(0o600)


def run_worker(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Runs the program of a rank that takes its call from a folder."""
    variables = {"RONDE_RANK": "0", "RONDE_LOCAL_SIZE": "1", "RONDE_SIZE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "ronde.run_worker", str(folder)],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")
def test_nothing_is_unpickled_from_a_folder_of_another_user(tmp_path: pathlib.Path) -> None:
    folder, marker = tmp_path / "folder", tmp_path / "marker"
    folder_with_a_call(folder, marker)
    os.chown(folder, 10_001, 10_001)
    done = run_worker(folder)
    assert done.returncode == 1
    assert "no rank sees the folder" in done.stderr, done.stderr
    assert not marker.exists()
    assert [each.name for each in folder.iterdir()] == ["call"]


@pytest.mark.parametrize("how", ["open to its group", "a link", "a call that is a link", "a call open to its group"])
def test_the_program_of_a_rank_unpickles_nothing_that_others_could_exchange(how: str, tmp_path: pathlib.Path) -> None:
    folder, marker, other = tmp_path / "folder", tmp_path / "marker", tmp_path / "other"
    folder_with_a_call(folder, marker)
    if how == "open to its group":
        folder.chmod(0o770)
    elif how == "a link":
        folder.rename(other)
        folder.symlink_to(other)
    elif how == "a call that is a link":
        (folder / "call").rename(other)
        (folder / "call").symlink_to(other)
    else:
        (folder / "call").chmod(0o660)
    done = run_worker(folder)
    assert done.returncode != 0, done.stdout
    assert not marker.exists()


def test_the_program_of_a_rank_runs_the_call_of_a_private_folder(tmp_path: pathlib.Path) -> None:
    """The tests above would see the call run."""
    folder, marker = tmp_path / "folder", tmp_path / "marker"
    folder_with_a_call(folder, marker)
    done = run_worker(folder)
    assert marker.is_dir(), done.stderr


# A remote shell that reaches a host on which the caller's temporary folder does not exist.
ELSEWHERE = '#!/bin/sh\nexec unshare --mount sh -c \'mount -t tmpfs none "$0" && exec sh -c "$1"\' {folder} "$2"\n'


@pytest.fixture
def other_host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Options that make every name but localhost a host that does not see the caller's temporary folder."""
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("another view of the file system can be made by root only")
    shell = tmp_path / "shell"
    # The path of a Unix socket has 107 bytes; pytest's folders leave too few of them.
    with tempfile.TemporaryDirectory(prefix="r-") as shared:
        monkeypatch.setenv("TMPDIR", shared)
        monkeypatch.setattr("tempfile.tempdir", None)
        shell.write_text(ELSEWHERE.format(folder=shared))
        shell.chmod(0o755)
        yield ["--remote-shell", str(shell), "--network-interfaces", "lo"]


def test_ranks_on_other_hosts_receive_the_call_and_return_results(other_host: list[str]) -> None:
    def where() -> tuple[bool, bytes]:
        folders = list(pathlib.Path(os.environ["TMPDIR"]).glob("ronde-call-*"))
        return bool(folders), bytes(int(os.environ["RONDE_RANK"]))

    for hosts, sees in (("localhost:1,b.invalid:2", [True, False, False]), ("a.invalid:1,localhost:1", [False, True])):
        results = ronde.run(where, np=len(sees), hosts=hosts, options=other_host)
        assert results == [(saw, bytes(rank)) for rank, saw in enumerate(sees)]


def test_ranks_that_are_spread_unevenly_choose_the_same_exchange() -> None:
    assert ronde.run(lambda: os.environ["RONDE_RANK"], np=3, options=["--sidecars", "2"]) == ["0", "1", "2"]


def test_hosts_from_the_environment_receive_the_call(other_host: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_RUN_HOSTS", "localhost:1,b.invalid:1")
    assert ronde.run(lambda: os.environ["RONDE_RANK"], np=2, options=other_host) == ["0", "1"]


def test_a_job_that_sees_no_folder_is_rejected_with_the_reason(other_host: list[str]) -> None:
    with pytest.raises(RuntimeError, match="no rank sees the folder"):
        ronde.run(print, np=2, hosts="a.invalid:1,b.invalid:1", options=other_host)


SCRIPT = """
import ronde

FACTOR = 7

def scaled(value):
    with ronde.connect() as client:
        return Point(client.rank * FACTOR + value)

class Point:
    def __init__(self, x):
        self.x = x

if __name__ == "__main__":
    print("points", [point.x for point in ronde.run(scaled, args=(1,), np=2)])
"""


@pytest.mark.parametrize("way", ["a file", "standard input"])
def test_functions_of_a_script_can_be_run(way: str, tmp_path: pathlib.Path) -> None:
    """Functions of `__main__` are pickled by value: a notebook has no file to import."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    command = [sys.executable, str(script)] if way == "a file" else [sys.executable]
    text = None if way == "a file" else SCRIPT
    done = subprocess.run(
        command, capture_output=True, text=True, input=text, timeout=TIMEOUT_S, env=environment, check=False, cwd="/"
    )
    assert (done.returncode, done.stdout) == (0, "points [1, 8]\n"), done.stderr


def test_an_interrupt_ends_the_job(tmp_path: pathlib.Path) -> None:
    """Ctrl-C in the caller ends workers and launcher before it is raised."""
    started = tmp_path / "started"
    program = f"""
import os, threading, ronde
def wait():
    with open({str(started)!r}, "w") as file: file.write(str(os.getpid()))
    threading.Event().wait({TIMEOUT_S})
ronde.run(wait)
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    os.mkfifo(started)
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment
    ) as caller:
        worker = int(started.read_text())
        caller.send_signal(2)
        _, errors = caller.communicate(timeout=TIMEOUT_S)
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_the_report_is_json(tmp_path: pathlib.Path) -> None:
    """What `ronde.run` reads of a report is there."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [ronde_binary(), "run", "-np", "1", "--report", str(report), "false"], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert json.loads(report.read_text())["failure"].startswith("rank 0 on host localhost exited with code 1")
