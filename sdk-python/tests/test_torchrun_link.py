"""The session of torchrun's agents, with real sessions: two agents in this process."""

from __future__ import annotations

import datetime
import subprocess
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import pytest
from conftest import ronde_binary
from thread_calls import together

pytest.importorskip("torch")

from torch.distributed import DistStoreError
from torch.distributed.elastic.utils import store as torch_store

import ronde
from ronde import own_sidecar
from ronde.torchrun import link as link_module
from ronde.torchrun.link import Link, LinkEndedError
from ronde.torchrun.replica import CLOSES, RESTARTS, Batch, Operation
from ronde.torchrun.store import AgentStore, until_all

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

TIMEOUT_S = 20.0
NAMES = ("alpha:7400", "beta:7400")


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Link]]:
    """Two agents that share a sidecar, which is no part of what is tested here."""
    monkeypatch.setenv("RONDE_BIN", ronde_binary())
    sidecar = own_sidecar.start(2, "agents")
    monkeypatch.setattr(link_module.own_sidecar, "stop", lambda sidecar: None)
    made: list[Any] = together(*(lambda rank=rank: connected(sidecar, rank) for rank in (0, 1)))
    for link in made:
        link.start()
    yield made
    together(*(lambda link=link: link.end(CLOSES) for link in made))
    monkeypatch.undo()
    own_sidecar.stop(sidecar)


def connected(sidecar: own_sidecar.OwnSidecar, rank: int) -> Link:
    return Link(ronde.connect(sidecar.socket, sidecar.job, rank, start_timeout=TIMEOUT_S), sidecar, NAMES)


def stores(links: list[Link]) -> list[AgentStore]:
    made = [AgentStore(link) for link in links]
    for store in made:
        store.set_timeout(datetime.timedelta(seconds=TIMEOUT_S))
    return made


def test_a_value_that_one_agent_writes_is_read_by_the_other(links: list[Link]) -> None:
    first, second = stores(links)
    first.set("text", "hello")
    assert second.get("text") == b"hello"
    first.multi_set(["a", "b"], [b"\x00\xff", "2"])
    assert second.multi_get(["b", "a"]) == [b"2", b"\x00\xff"]
    assert (first.add("count", 2), second.add("count", 3), second.get("count")) == (2, 5, b"5")
    assert second.compare_set("text", "hello", "new") == b"new"
    assert first.compare_set("text", "hello", "other") == b"new"
    second.append("text", "er")
    assert second.get("text") == b"newer"
    assert (first.check(["a", "b"]), first.check(["a", "z"])) == (True, False)
    assert (second.delete_key("a"), second.delete_key("a")) == (True, False)
    assert second.list_keys() == ["b", "count", "text"]
    assert second.num_keys() == 3


def test_sums_of_both_agents_are_different_numbers(links: list[Link]) -> None:
    found = together(*(lambda store=store: [store.add("count", 1) for _ in range(20)] for store in stores(links)))
    assert sorted(found[0] + found[1]) == list(range(1, 41))


def test_pytorchs_own_functions_work_on_the_store(links: list[Link]) -> None:
    made = stores(links)
    found = together(
        *(
            lambda rank=rank: torch_store.synchronize(made[rank], b"%d" % rank, rank, 2, "data", TIMEOUT_S)
            for rank in (0, 1)
        )
    )
    assert found == [[b"0", b"1"]] * 2
    assert together(*(lambda store=store: torch_store.barrier(store, 2, "exit", TIMEOUT_S) for store in made)) == [
        None,
        None,
    ]
    assert made[0].timeout == datetime.timedelta(seconds=TIMEOUT_S)


def test_a_wait_without_a_value_names_the_key(links: list[Link]) -> None:
    store = stores(links)[0]
    store.set("here", "x")
    with pytest.raises(DistStoreError, match="no agent of torchrun has written there, missing within 0 s"):
        store.wait(["here", "there", "missing"], datetime.timedelta(seconds=0.1))


def test_a_large_value_travels_and_a_larger_one_is_refused(links: list[Link]) -> None:
    first, second = stores(links)
    first.set("large", b"x" * 1_000_000)
    assert len(second.get("large")) == 1_000_000
    with pytest.raises(ValueError, match="is larger than"):
        first.set("larger", b"x" * 1_100_000)
    assert first.add("after", 1) == 1


@pytest.mark.parametrize(("reason", "text"), [(RESTARTS, "begun to start its workers again"), (CLOSES, "left the job")])
def test_an_agent_that_leaves_ends_the_session_for_both(links: list[Link], reason: str, text: str) -> None:
    first, second = stores(links)
    first.set("last", "word")
    together(lambda: links[0].end(reason))
    with pytest.raises(DistStoreError, match=rf"has written never: node 0 \(alpha:7400\) has .*{text}"):
        second.wait(["never"])
    assert links[0].left() == links[1].left() == (0, reason)
    assert second.get("last") == b"word", "what was written before stays readable"
    with pytest.raises(DistStoreError, match=rf"late cannot be changed: node 0 .*{text}"):
        second.set("late", "x")


def test_both_may_leave_at_once_after_a_barrier(links: list[Link]) -> None:
    def leave(rank: int) -> None:
        torch_store.barrier(AgentStore(links[rank]), 2, "exit", TIMEOUT_S)
        links[rank].end(CLOSES)

    begun = time.monotonic()
    assert together(lambda: leave(0), lambda: leave(1)) == [None, None]
    assert time.monotonic() - begun < TIMEOUT_S


def test_an_agent_that_is_lost_is_an_error_for_the_other(links: list[Link]) -> None:
    second = stores(links)[1]
    links[0]._client.close()
    with pytest.raises(DistStoreError, match="the session of torchrun's agents is over"):
        second.wait(["never"])
    with pytest.raises(LinkEndedError, match="the session of torchrun's agents is over"):
        links[1].submit(Operation("set", "k"), TIMEOUT_S)
    assert links[1].left() is None


def test_an_agent_that_stands_still_does_not_keep_the_other(links: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_LEAVE_TIMEOUT_S", 1.0)
    stop, stopped = threading.Event(), threading.Event()

    def stand_still() -> None:
        stopped.set()
        stop.wait(3 * TIMEOUT_S)

    monkeypatch.setattr(links[0], "_exchange", stand_still)
    assert stopped.wait(TIMEOUT_S)
    with pytest.raises(TimeoutError, match="has not taken part in an exchange for 1 s"):
        links[1].submit(Operation("set", "k"), 1.0)
    begun = time.monotonic()
    links[1].end(RESTARTS)
    assert time.monotonic() - begun < TIMEOUT_S
    stop.set()


def test_what_cannot_be_parsed_names_its_agent(links: list[Link], monkeypatch: pytest.MonkeyPatch) -> None:
    class Pickled:
        def encode(self) -> bytes:
            return b"\x80\x04N."

    monkeypatch.setattr(link_module, "Batch", lambda *fields: Pickled())
    with pytest.raises(DistStoreError, match=r"the agent of node \d \((alpha|beta):7400\) sent not a batch"):
        stores(links)[1].wait(["never"])


def test_keys_that_are_missing_are_reported_when_they_change(links: list[Link]) -> None:
    reported: list[list[str]] = []
    has_reported = threading.Event()
    first = stores(links)[0]

    def report(missing: list[str]) -> None:
        reported.append(missing)
        has_reported.set()

    waiting = threading.Thread(target=lambda: until_all(links[1], ["a", "b"], TIMEOUT_S, report))
    waiting.start()
    assert has_reported.wait(TIMEOUT_S)
    first.set("b", "1")
    first.set("a", "1")
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    assert reported[0] == ["a", "b"]
    assert reported[-1] in (["a"], ["a", "b"])
    with pytest.raises(TimeoutError):
        until_all(links[1], ["z"], 0.1, reported.append)


class LateCondition(threading.Condition):
    """Wakes a thread that waits only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.wake = threading.Event(), threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        is_notified = super().wait(timeout)
        self.release()
        try:
            assert self.wake.wait(TIMEOUT_S)
        finally:
            self.acquire()
        return is_notified


@pytest.mark.parametrize("exchanges", [1, 2])
def test_a_wait_sees_a_value_that_is_deleted_before_its_thread_wakes(
    monkeypatch: pytest.MonkeyPatch, exchanges: int
) -> None:
    """In the same exchange and in the next one."""
    written, deleted = Operation("set", "key", b"value"), Operation("delete", "key")
    client: Any = types.SimpleNamespace(rank=0)
    sidecar: Any = None
    link, changed = Link(client, sidecar, NAMES), LateCondition()
    batches = [[written, deleted]] if exchanges == 1 else [[written], [deleted]]
    received = iter([Batch(tuple(operations)).encode() for operations in batches])
    monkeypatch.setattr(link, "gather", lambda data, name: [data, next(received)])
    monkeypatch.setattr(link, "_changed", changed)
    (store, *_), found = stores([link]), []
    reading = threading.Thread(target=lambda: found.append(store.get("key")), daemon=True)
    reading.start()
    assert changed.waits.wait(TIMEOUT_S)
    for _ in range(exchanges):
        link._exchange()
    changed.wake.set()
    reading.join(TIMEOUT_S)
    assert found == [b"value"]
    assert not store.check(["key"])


# === Sidecars for several nodes ===


def test_a_sidecar_ends_with_its_input_and_reports_why_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("RONDE_BIN", ronde_binary())
    secret = tmp_path / "secret"
    subprocess.run([ronde_binary(), "certs", "secret", str(secret)], check=True, capture_output=True)
    options = ["--end-with-input", "--job-secret-file", str(secret), "--job", "night", "--index", "1"]
    peers = ["--peers", "127.81.0.1:7400,127.81.0.2:7400", "--lanes", "1"]
    sidecar = own_sidecar.start_with([*options, *peers], keeps_output=True)
    assert (sidecar.job, list(sidecar.tokens)) == ("night", [1])
    assert sidecar.process.poll() is None
    assert sidecar.process.stdin is not None
    sidecar.process.stdin.close()
    assert sidecar.process.wait(TIMEOUT_S) == 0
    assert own_sidecar.failure(sidecar, TIMEOUT_S) is None
    own_sidecar.stop(sidecar)
    alone = own_sidecar.start_with([*options, *peers, "--start-timeout", "1"], keeps_output=True)
    reason = own_sidecar.failure(alone, TIMEOUT_S)
    own_sidecar.stop(alone)
    assert reason is not None
    assert "sidecar 0 did not connect" in reason
