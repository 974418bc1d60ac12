"""Ranks meet over a key-value store: those of PyTorch, and a directory."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any, Callable

import pytest
from conftest import PACKAGE, WORKERS, ronde_binary

import ronde
from ronde import rendezvous, without_launcher
from ronde.private_folder import DirectoryStore
from ronde.processes import HostIdentity, ProcessIdentity, identity_of, is_alive, launcher_of_this_host, own_host
from ronde.rendezvous import Member, Sidecar, meet, problem

HOST = HostIdentity("alpha", "boot", "mnt:[1]", "net:[1]")
OTHER_HOST = HostIdentity("beta", "other boot", "mnt:[1]", "net:[1]")
ENDED = ProcessIdentity(2**22 + 1, 1)
SIDECAR = Sidecar("/run/s", "ranks-1", identity_of(os.getpid()))
TIMEOUT_S = 20.0


def member(rank: int, size: int = 2, **changed: Any) -> Member:
    return replace(Member(rank, size, own_host(), os.geteuid(), identity_of(os.getpid())), **changed)


class Dictionary:
    """A store whose `get` does not wait."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Makes calls on threads of their own; returns their results or errors."""
    results: list[Any] = [None] * len(calls)

    def make(index: int) -> None:
        try:
            results[index] = calls[index]()
        except ronde.RondeError as error:
            results[index] = error

    threads = [threading.Thread(target=make, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


def met(store: Any, *members: Member, timeout: float = TIMEOUT_S, **options: Any) -> list[Any]:
    def call(each: Member) -> Callable[[], Any]:
        return lambda: meet(each, store, timeout, lambda: SIDECAR, **options)

    return together(*map(call, members))


# === The decision ===


def test_processes_of_one_host_and_user_are_a_job() -> None:
    members = {rank: member(rank, 3, host=HOST) for rank in range(3)}
    assert problem(members) is None
    renamed = {**members, 1: member(1, 3, host=HOST._replace(name="alias"))}
    assert problem(renamed) is None, "a host's name does not identify it"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"size": 3}, r"rank 0 \(process \d+ on alpha\) was started as one of 2, rank 1 .* as one of 3"),
        ({"rank": 0}, "answered as rank 1, but it is rank 0"),
        ({"user": 77}, r"rank 0 runs as user \d+, rank 1 as user 77"),
        ({"served": True}, "rank 1 found a sidecar that runs already .* rank 0 did not"),
        ({"host": OTHER_HOST}, "several hosts: rank 0 on alpha, rank 1 on beta"),
        ({"host": HOST._replace(mounts="mnt:[2]")}, "rank 1 on alpha in another container or network namespace"),
    ],
)
def test_processes_that_do_not_fit_together(changed: dict[str, Any], text: str) -> None:
    second = replace(member(1, host=HOST), **changed)
    reason = problem({0: member(0, host=HOST), 1: second})
    assert reason is not None
    assert re.search(text, reason), reason


def test_several_hosts_name_the_ways() -> None:
    reason = problem({0: member(0, host=HOST), 1: member(1, host=OTHER_HOST)})
    for way in ("ronde run -np", "ronde sidecar", "--certs", "--job-secret-file", "RONDE_SOCKET", "RONDE_JOB"):
        assert way in str(reason)


def test_hosts_with_sidecars_are_a_job() -> None:
    assert problem({0: member(0, host=HOST, served=True), 1: member(1, host=OTHER_HOST, served=True)}) is None


def test_a_sidecar_has_at_most_64_workers() -> None:
    reason = problem({rank: member(rank, 65, host=HOST) for rank in range(65)})
    assert "65 processes on one host" in str(reason)
    assert "--sidecars 2" in str(reason)


# === Meeting ===


def stores(tmp_path: pathlib.Path) -> dict[str, Callable[[], Any]]:
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return {
        "dictionary": Dictionary,
        "directory": lambda: DirectoryStore(tmp_path / "meet"),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "file"), -1),
        "tcp": lambda: dist.PrefixStore("a/b", server),
    }


@pytest.mark.parametrize("kind", ["dictionary", "directory", "hash", "file", "tcp"])
def test_ranks_meet_again_and_again(tmp_path: pathlib.Path, kind: str) -> None:
    store = stores(tmp_path)[kind]()
    for _ in range(3):
        assert met(store, *(member(rank, 4) for rank in (3, 1, 2, 0))) == [SIDECAR] * 4


@pytest.mark.parametrize("kind", ["directory", "hash", "file", "tcp"])
def test_a_missing_rank_is_named_on_all(tmp_path: pathlib.Path, kind: str) -> None:
    store = stores(tmp_path)[kind]()
    for error in met(store, member(0, 4), member(2, 4), timeout=2):
        assert isinstance(error, ronde.TimedOutError)
        assert "ranks 1, 3 of 4 did not come within 2 s, 2 did" in str(error)
        assert error.cause == "start"


def test_a_missing_rank_0_is_named() -> None:
    (error,) = met(Dictionary(), member(1), timeout=0.3)
    assert isinstance(error, ronde.TimedOutError)
    assert "rank 0 of 2 did not come within 0 s" in str(error)


def test_a_rank_0_that_ends_while_others_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "START_TIMEOUT_S", 0.3)
    store = Dictionary()
    store.set("ronde/outcome", json.dumps(asdict(rendezvous._Outcome("x"))).encode())
    store.set("ronde/begin", json.dumps({"member": asdict(member(0, nonce="x", process=ENDED))}).encode())
    (error,) = met(store, member(1), timeout=0.3)
    assert "has come and has ended, but has not reported a sidecar" in str(error)


def test_ranks_that_disagree_on_the_size() -> None:
    errors = met(Dictionary(), member(0, 2), member(1, 3))
    assert [error.cause for error in errors] == ["settings"] * 2
    assert all("disagree on the number of processes" in str(error) for error in errors)


def test_a_rank_beyond_the_others_size() -> None:
    *pair, error = met(Dictionary(), member(0, 2), member(1, 2), member(2, 3), timeout=3)
    assert pair == [SIDECAR] * 2
    assert isinstance(error, ronde.RondeError)
    assert re.search("disagree|rank 2, not this process", str(error))


def test_two_jobs_with_one_name() -> None:
    """One of them at most is complete; a rank of each other one fails, so that its launcher ends it."""
    results = met(Dictionary(), member(0), member(1), member(0), member(1), timeout=3)
    failed = [isinstance(result, ronde.RondeError) for result in results]
    complete = [not any(failed[:2]), not any(failed[2:])]
    assert sum(complete) <= 1, results
    assert any("Two jobs have one name or one store" in str(result) for result in results)


def test_a_second_job_with_the_name_of_one_that_begins() -> None:
    """The first one goes on; rank 0 of the second one fails at once."""
    other = subprocess.Popen(["sleep", "60"])
    try:
        store = Dictionary()
        store.set("ronde/outcome", json.dumps(asdict(rendezvous._Outcome("x"))).encode())
        first = member(0, nonce="x", process=identity_of(other.pid))
        store.set("ronde/begin", json.dumps({"member": asdict(first)}).encode())
        (error,) = met(store, member(0), timeout=1)
        assert f"process {other.pid} on" in str(error)
        assert json.loads(store.values["ronde/begin"])["member"]["nonce"] == "x"
    finally:
        other.kill()
        other.wait()
    assert met(store, member(0), member(1)) == [SIDECAR] * 2


def test_one_rank_twice() -> None:
    store = Dictionary()
    results = met(store, member(1, 3), member(1, 3), member(0, 3), timeout=3)
    assert all(isinstance(result, ronde.RondeError) for result in results)
    assert any("two processes answered as rank 1" in str(result) for result in results)


def test_a_rank_that_replaces_one_that_ended_meets_in_its_place() -> None:
    store = Dictionary()
    first = member(1, 3, process=ENDED)
    results: list[Any] = []
    lead = threading.Thread(target=lambda: results.extend(met(store, member(0, 3))), daemon=True)
    lead.start()
    assert wait_for(store, "ronde/begin")
    store.set("ronde/answer/1", answer_to(store, first))
    again = met(store, member(1, 3), member(2, 3))
    lead.join(TIMEOUT_S)
    assert (again, results) == ([SIDECAR] * 2, [SIDECAR])


def wait_for(store: Dictionary, key: str) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while key not in store.values and time.monotonic() < deadline:
        time.sleep(0.01)
    return key in store.values


def answer_to(store: Dictionary, one: Member) -> bytes:
    lead = json.loads(store.values["ronde/begin"])["member"]
    return json.dumps({"round": lead["nonce"], "member": asdict(one)}).encode()


def test_a_restarted_task_takes_the_sidecar_that_serves() -> None:
    store = Dictionary()
    assert met(store, member(0), member(1, process=ENDED)) == [SIDECAR] * 2
    assert met(store, member(1), joins_again=True) == [SIDECAR]


def test_a_process_does_not_take_the_place_of_one_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "START_TIMEOUT_S", 0.3)
    store = Dictionary()
    assert met(store, member(0), member(1)) == [SIDECAR] * 2
    (error,) = met(store, member(1), timeout=0.3, joins_again=True)
    assert "is rank 1, not this process" in str(error)


def test_the_failure_of_the_sidecar_reaches_all() -> None:
    def fail() -> Sidecar:
        raise ronde.RondeError("there is no command `ronde`", "connect")

    store = Dictionary()
    errors = together(*(lambda each=each: meet(each, store, TIMEOUT_S, fail) for each in (member(0), member(1))))
    assert [(str(error), error.cause) for error in errors] == [("there is no command `ronde`", "connect")] * 2


@pytest.mark.parametrize("value", [b"\x80\x04.", b"[]", b"{}", b'{"member": 1}', b'{"member": {"rank": "x"}}'])
def test_other_values_in_the_store(value: bytes) -> None:
    store = Dictionary()
    store.set("ronde/begin", value)
    (error,) = met(store, member(1), timeout=1)
    assert isinstance(error, ronde.RondeError)
    assert "is not one that ronde of this release wrote" in str(error)


def test_a_store_that_fails() -> None:
    class Broken(Dictionary):
        def wait(self, keys: list[str], timeout: Any) -> None:
            raise ConnectionError("Broken pipe")

    (error,) = met(Broken(), member(1), timeout=1)
    assert "the store of the rendezvous failed" in str(error)
    assert "Broken pipe" in str(error)


# === Directories ===


def test_a_directory_of_others_is_rejected(tmp_path: pathlib.Path) -> None:
    for mode in (0o755, 0o770, 0o711):
        directory = tmp_path / f"{mode:o}"
        directory.mkdir()
        directory.chmod(mode)
        (error,) = met(DirectoryStore(directory), member(1), timeout=1)
        assert "is not a directory of this user alone" in str(error)
    link = tmp_path / "link"
    (tmp_path / "own").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "own")
    (error,) = met(DirectoryStore(link), member(0), timeout=1)
    assert "is not a directory of this user alone" in str(error)


@pytest.mark.parametrize("kind", ["relative", "missing", "mode", "link"])
def test_a_session_directory_of_others_is_rejected(tmp_path: pathlib.Path, kind: str) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    paths = {
        "relative": "private",
        "missing": "/no/such",
        "mode": str(tmp_path / "open"),
        "link": str(tmp_path / "link"),
    }
    with pytest.raises(ronde.RondeError, match="session directory") as raised:
        without_launcher._check_is_private(SIDECAR._replace(socket=paths[kind]))
    assert raised.value.cause == "settings"
    without_launcher._check_is_private(SIDECAR._replace(socket=str(tmp_path / "private")))


# === Processes ===


def test_processes_are_identified() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identity_of(child.pid)
    assert is_alive(identity)
    assert not is_alive(identity._replace(started=identity.started + 1)), "an ID that was used again"
    child.communicate(b"\n")
    assert not is_alive(identity)


def test_the_launcher_is_the_first_ancestor_without_the_variable() -> None:
    script = "from ronde.processes import launcher_of_this_host as f; print(f('SOME_RANK').pid)"
    wrapped = ["sh", "-c", 'sh -c \'"$0" -c "$1"; true\' "$0" "$1"; true', sys.executable, script]
    environment = {**os.environ, "SOME_RANK": "1"}
    done = subprocess.run(wrapped, capture_output=True, text=True, env=environment, check=True, timeout=TIMEOUT_S)
    assert int(done.stdout) == os.getpid()
    assert launcher_of_this_host("SOME_RANK").pid == os.getppid()


# === Jobs ===


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_out_of_range(rank: int, size: int) -> None:
    with pytest.raises(ronde.RondeError, match="a rank is from 0 to"):
        without_launcher.settings_for_ranks(rank, size, Dictionary())


def test_ranks_of_ronde_run_need_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RONDE_RANK": "1", "RONDE_SIZE": "2", "RONDE_SOCKET": "/s", "RONDE_JOB": "j"}.items():
        monkeypatch.setenv(name, value)
    store: Any = None
    assert without_launcher.settings_for_ranks(1, 2, store) == {"rank": 1}
    with pytest.raises(ronde.RondeError, match="gives rank 1 of 4 processes, but RONDE_SIZE is 2"):
        without_launcher.settings_for_ranks(1, 4, store)


def test_ranks_of_sidecars_that_run_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_SOCKET", "/s")
    store = Dictionary()
    calls = [lambda rank=rank: without_launcher.settings_for_ranks(rank, 2, store, 5) for rank in (0, 1)]
    assert together(*calls) == [{"rank": 0}, {"rank": 1}]


def run(script: str, *arguments: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not re.match(r"RONDE_|HOROVOD_|XDG_RUNTIME", name)}
    kept.update(variables, RONDE_BIN=ronde_binary(), PYTHONPATH=str(PACKAGE))
    command = [sys.executable, str(WORKERS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=kept, check=False)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_without_a_launcher(tmp_path: pathlib.Path, method: str) -> None:
    pytest.importorskip("torch")
    done = run("ranks_by_store.py", "job", method, str(tmp_path / "store"), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 3, session {session}: 3" for rank in range(3) for session in range(3)
    ]
    assert not list(tmp_path.glob("ronde-*")), "the sidecars have ended"


def test_ranks_may_end_in_any_order(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    done = run("ranks_by_store.py", "early", "spawn", str(tmp_path / "store"), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 has its result 2.0 after rank 0 has ended" in done.stdout
    assert "rank" not in done.stderr, done.stderr


def test_threads_are_ranks_of_several_worlds(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    done = run("ranks_by_store.py", "threads", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sidecars at the end of the loop: 1" in done.stdout, done.stdout
