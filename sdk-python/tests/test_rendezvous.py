"""Ranks meet over a key-value store: those of PyTorch, and a directory."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from typing import Any, Callable

import pytest
from conftest import PACKAGE, WORKERS, ronde_binary
from thread_calls import together

import ronde
from ronde import own_sidecar, private_folder, rendezvous, without_launcher
from ronde.private_folder import DirectoryStore
from ronde.processes import HostIdentity, ProcessIdentity, identity_of, is_alive, launcher_of_this_host, own_host
from ronde.rendezvous import Member, Sidecar, meet, problem

HOST = HostIdentity("alpha", "boot", "net:[1]")
OTHER_HOST = HostIdentity("beta", "other boot", "net:[1]")
ENDED = ProcessIdentity(2**22 + 1, 1, identity_of(os.getpid()).pids)
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


def met(store: Any, *members: Member, timeout: float = TIMEOUT_S, **options: Any) -> list[Any]:
    # The threads may start late; whoever meets before the others have begun might not wait for them.
    begin = threading.Barrier(len(members))

    def call(each: Member) -> Callable[[], Any]:
        def begun() -> Any:
            begin.wait(TIMEOUT_S)
            return meet(each, store, timeout, lambda: SIDECAR, **options)

        return begun

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
        ({"host": HOST._replace(network="net:[2]")}, "rank 1 on alpha in another network namespace"),
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
    for error in met(store, member(0, 4), member(2, 4), timeout=4):
        assert isinstance(error, ronde.TimedOutError)
        assert "ranks 1, 3 of 4 did not come within 4 s, 2 did" in str(error)
        assert error.cause == "start"


def test_a_missing_rank_0_is_named() -> None:
    (error,) = met(Dictionary(), member(1), timeout=0.3, place="/tmp/ronde-ranks-x")
    assert isinstance(error, ronde.TimedOutError)
    assert "rank 0 of 2 did not come within 0 s" in str(error)
    assert "in containers of their own, mount the directory of /tmp/ronde-ranks-x into all of them" in str(error)


def begun(store: Dictionary, lead: Member, **outcome: Any) -> None:
    """Writes what rank 0 does when it begins a round, and what it has reported."""
    store.set("ronde/outcome", json.dumps(asdict(rendezvous._Outcome(lead.nonce, **outcome))).encode())
    store.set("ronde/begin", json.dumps({"member": asdict(lead)}).encode())


def test_a_rank_0_that_ends_while_others_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "START_TIMEOUT_S", 2)
    store = Dictionary()
    lead = subprocess.Popen(["sleep", "60"])
    try:
        begun(store, member(0, process=identity_of(lead.pid)))
        results: list[Any] = []
        rank = threading.Thread(target=lambda: results.extend(met(store, member(1), timeout=2)), daemon=True)
        rank.start()
        assert wait_for(store, "ronde/answer/1")
    finally:
        lead.kill()
        lead.wait()
    rank.join(TIMEOUT_S)
    assert f"rank 0 (process {lead.pid} on " in str(results[0])
    assert "has come and has ended, but has not reported a sidecar" in str(results[0])


@pytest.mark.parametrize("state", ["pending", "ready", "failed"])
def test_an_earlier_rank_0_is_not_that_which_does_not_come(state: str) -> None:
    """Values of an earlier round whose rank 0 has ended: in this one, rank 0 is the culprit."""
    store = Dictionary()
    ranks = [(str(rank), f"process {rank}", ENDED) for rank in (0, 1)] if state == "ready" else []
    begun(store, member(0, process=ENDED), state=state, ranks=ranks, reason="no space", cause="connect")
    (error,) = met(store, member(1), timeout=0.3)
    assert isinstance(error, ronde.TimedOutError)
    assert "rank 0 of 2 did not come within 0 s" in str(error)
    assert f"An earlier one (process {ENDED.pid} on " in str(error)
    assert ("before this process came: no space" in str(error)) == (state == "failed")


def test_a_rank_0_that_begins_again_and_again_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "START_TIMEOUT_S", 2)
    store, stop = Dictionary(), threading.Event()

    def begin() -> None:
        while not stop.wait(0.1):
            begun(store, member(0))

    lead = threading.Thread(target=begin, daemon=True)
    lead.start()
    try:
        (error,) = met(store, member(1), timeout=2)
    finally:
        stop.set()
        lead.join(TIMEOUT_S)
    assert isinstance(error, ronde.TimedOutError)
    assert re.search(r"rank 0 .* has begun \d+ times within 12 s and never reported a sidecar", str(error)), error


def test_the_process_of_another_container_is_not_known_to_have_ended() -> None:
    assert not is_alive(ENDED)
    assert is_alive(ENDED._replace(pids="pid:[1]"))


def test_ranks_that_disagree_on_the_size() -> None:
    errors = met(Dictionary(), member(0, 2), member(1, 3))
    assert [error.cause for error in errors] == ["settings"] * 2
    assert all("disagree on the number of processes" in str(error) for error in errors)


def test_a_rank_beyond_the_others_size() -> None:
    """Those whose number is right begin; the other one fails by the number, in whatever order they come."""
    *pair, error = met(Dictionary(), member(0, 2), member(1, 2), member(2, 3), timeout=3)
    assert pair == [SIDECAR] * 2
    assert isinstance(error, ronde.RondeError)
    assert error.cause == "settings"
    assert re.search("rank 0 .* was started as one of 2, rank 2 .* as one of 3", str(error)), error


def test_a_rank_of_another_size_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "START_TIMEOUT_S", 0.3)
    store = Dictionary()
    assert met(store, member(0, 2), member(1, 2)) == [SIDECAR] * 2
    (error,) = met(store, member(2, 3), timeout=0.3)
    assert re.search("rank 0 .* was started as one of 2, rank 2 .* as one of 3", str(error)), error


def test_two_jobs_with_one_name() -> None:
    """One of them at most is complete; a rank of each other one fails with the reason, so that its launcher ends it."""
    results = met(Dictionary(), member(0), member(1), member(0), member(1), timeout=3)
    check_two_jobs(results[:2], results[2:])


def check_two_jobs(*jobs: list[Any]) -> None:
    """Each rank has the sidecar or an error that names the processes; no two jobs are complete."""
    results = [result for job in jobs for result in job]
    failures = [str(result) for result in results if isinstance(result, ronde.RondeError)]
    assert all(isinstance(result, (Sidecar, ronde.RondeError)) for result in results), results
    assert sum(all(isinstance(result, Sidecar) for result in job) for job in jobs) <= 1, results
    for failure in failures:
        assert "Two jobs have one name or one store" in failure, results
        assert len(re.findall(rf"process {os.getpid()} on ", failure)) >= 2, results
    # A rank 0 that goes on has all of its ranks.
    begun = sum(isinstance(job[0], Sidecar) for job in jobs)
    others = sum(isinstance(job[1], Sidecar) for job in jobs)
    assert begun <= 1, results
    assert others == begun, results


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
    store.set("ronde/answer/1", former := answer_to(store, first))
    again: list[Any] = []
    second = threading.Thread(target=lambda: again.extend(met(store, member(1, 3))), daemon=True)
    second.start()
    # Rank 0 decides as soon as all have answered, and the one that has ended has.
    assert wait_for(store, "ronde/answer/1", former)
    last = met(store, member(2, 3))
    for thread in (lead, second):
        thread.join(TIMEOUT_S)
    assert (last, again, results) == ([SIDECAR], [SIDECAR], [SIDECAR])


def wait_for(store: Dictionary, key: str, former: bytes | None = None) -> bool:
    """Waits until the store has a value, other than the former one."""
    deadline = time.monotonic() + TIMEOUT_S
    while store.values.get(key) == former and time.monotonic() < deadline:
        time.sleep(0.01)
    return store.values.get(key) != former


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
    assert [(str(error), error.cause) for error in errors] == [
        ("there is no command `ronde` [RONDE-E310]", "connect")
    ] * 2


def test_any_error_of_rank_0_reaches_all() -> None:
    def fail() -> Sidecar:
        raise BlockingIOError(11, "no more processes")

    store = Dictionary()
    since = time.monotonic()
    errors = together(*(lambda each=each: meet(each, store, TIMEOUT_S, fail) for each in (member(0), member(1))))
    assert time.monotonic() - since < TIMEOUT_S / 2
    for error in errors:
        assert isinstance(error, ronde.RondeError)
        assert error.cause == "connect"
        assert "BlockingIOError: [Errno 11] no more processes" in str(error)


def test_the_interrupt_of_rank_0_reaches_all() -> None:
    def interrupt() -> Sidecar:
        raise KeyboardInterrupt

    def lead() -> str:
        with pytest.raises(KeyboardInterrupt):
            meet(member(0), store, TIMEOUT_S, interrupt)
        return "interrupted"

    store = Dictionary()
    interrupted, error = together(lead, lambda: meet(member(1), store, TIMEOUT_S, interrupt))
    assert interrupted == "interrupted"
    assert "was ended by KeyboardInterrupt" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_cannot_be_written(rank: int) -> None:
    class Full(Dictionary):
        def set(self, key: str, value: bytes) -> None:
            raise OSError(28, "No space left on device")

    store = Full()
    begun_before = Dictionary()
    begun(begun_before, member(0))
    store.values.update(begun_before.values if rank == 1 else {})
    (error,) = met(store, member(rank), timeout=1)
    assert isinstance(error, ronde.RondeError)
    assert error.cause == "connect"
    assert "the store of the rendezvous failed" in str(error)
    assert "No space left on device" in str(error)


class StandIn:
    """Instead of a sidecar: a process that ends when its input does, as a sidecar does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, socket: pathlib.Path) -> None:
        self.started: list[own_sidecar.OwnSidecar] = []
        self._socket = socket
        monkeypatch.setattr(own_sidecar, "start", self.start)

    def start(self, ranks: int, job: str) -> own_sidecar.OwnSidecar:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.started.append(own_sidecar.OwnSidecar(process, os.getpid(), str(self._socket), job, ranks))
        return self.started[-1]


def test_the_sidecar_of_ranks_that_do_not_meet_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Another process answers as rank 1 while the sidecar starts."""
    stand_in, store = StandIn(monkeypatch, tmp_path), Dictionary()
    start = stand_in.start

    def late(ranks: int, job: str) -> own_sidecar.OwnSidecar:
        store.set("ronde/answer/1", answer_to(store, member(1)))
        return start(ranks, job)

    monkeypatch.setattr(own_sidecar, "start", late)
    calls = [lambda rank=rank: without_launcher.settings_for_ranks(rank, 2, store, 3) for rank in (0, 1)]
    error, _ = together(*calls)
    assert "two processes answered as rank 1" in str(error)
    (sidecar,) = stand_in.started
    assert sidecar.process.poll() is not None, "it still runs"
    assert sidecar not in without_launcher._ranks.sidecars


# Another thread would fork at this time.
FORKING = """
import os
from ronde import own_sidecar

def forked(process, timeout):
    child = os.fork()
    if child == 0:
        os._exit(0 if process.stdin.closed else 1)
    print("the child has ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert not process.stdin.closed
    return "/run/s", "job", {}

own_sidecar._program, own_sidecar._serving = lambda: "true", forked
own_sidecar.stop(own_sidecar.start(1, "job"))
"""


def test_a_child_that_is_forked_while_a_sidecar_starts_does_not_keep_it() -> None:
    """The end of its input stops a sidecar; a child that had the input, too, would delay that to its own end."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "the child has ended with 0\n"), done.stderr


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
        "missing": "/no/such",  # as in another container
        "mode": str(tmp_path / "open"),
        "link": str(tmp_path / "link"),
    }
    with pytest.raises(ronde.RondeError, match="session directory") as raised:
        without_launcher._check_is_private(SIDECAR._replace(socket=paths[kind]))
    assert raised.value.cause == "settings"
    without_launcher._check_is_private(SIDECAR._replace(socket=str(tmp_path / "private")))


def test_a_runtime_directory_that_is_not_this_users_alone_is_not_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm copies XDG_RUNTIME_DIR from the login node, where /run/user/UID exists."""
    monkeypatch.setattr(tempfile, "tempdir", "/temporary")
    own = tmp_path / "own"
    for given in (own, "", "relative"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(given))
        assert private_folder.own_base() == pathlib.Path("/temporary")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    own.mkdir()
    for mode, base in ((0o755, "/temporary"), (0o710, "/temporary"), (0o700, str(own))):
        own.chmod(mode)
        assert private_folder.own_base() == pathlib.Path(base)
    if os.geteuid() == 0:
        os.chown(own, 65_534, -1)
        assert private_folder.own_base() == pathlib.Path("/temporary")


def test_a_directory_that_cannot_be_made(tmp_path: pathlib.Path) -> None:
    store = DirectoryStore(tmp_path / "missing" / "meet")
    (error,) = met(store, member(0), timeout=1)
    assert isinstance(error, ronde.RondeError)
    assert error.cause == "connect"
    assert "cannot write in" in str(error)
    assert "No such file or directory" in str(error)


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
    done = subprocess.run(wrapped, capture_output=True, text=True, env=environment, check=True, timeout=120)
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
