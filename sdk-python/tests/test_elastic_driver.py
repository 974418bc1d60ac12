"""Horovod's elastic driver with injected workers and hosts: discovery, rounds, notifications."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Any, Callable
from unittest import mock

import pytest

from horovod.runner.common.util import secret
from horovod.runner.common.util.hosts import INVALID_SLOT_INFO
from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.elastic import constants, discovery
from horovod.runner.elastic.discovery import DiscoveredHosts, FixedHosts, HostDiscoveryScript, HostManager, HostState
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.registration import FAILURE, READY, SUCCESS, WorkerStateRegistry
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.elastic.settings import ElasticSettings
from horovod.runner.elastic.worker import (
    HostUpdateResult,
    WorkerNotificationClient,
    WorkerNotificationManager,
    WorkerNotificationService,
)
from horovod.runner.http import http_server
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import RendezvousServer

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Sequence

TIMEOUT_S = 20
Worker = Callable[[Any, Any], "tuple[int, float]"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.02)


@pytest.fixture
def make() -> Iterator[Callable[..., ElasticDriver]]:
    """Makes drivers, which are stopped at the end."""
    made: list[ElasticDriver] = []

    def driver(hosts: Any, least: int = 2, most: int | None = 4, **options: Any) -> ElasticDriver:
        found = hosts if not isinstance(hosts, dict) else FixedHosts(hosts)
        made.append(ElasticDriver(mock.Mock(), found, least, most, **{"timeout": TIMEOUT_S, **options}))
        return made[-1]

    yield driver
    for each in made:
        each.stop()


def run(driver: ElasticDriver, worker: Worker, least: int = 2) -> dict[str, int]:
    """Runs a job. Returns the exit status of each worker of the last round."""
    driver.wait_for_available_slots(least)
    driver.start(least, worker)
    return {name: status for name, (status, _) in driver.get_results().worker_results.items()}


# === Rounds ===


def test_all_workers_succeed(make: Callable[..., ElasticDriver]) -> None:
    driver, seen = make({"host-1": 2, "host-2": 2}), {}

    def worker(slot: Any, events: Any) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        seen[slot.rank] = (slot, driver.get_slot_info(slot.hostname, slot.local_rank))
        return 0, time.time()

    assert run(driver, worker) == dict.fromkeys(["host-1[0]", "host-1[1]", "host-2[0]", "host-2[1]"], 0)
    assert sorted(seen) == [0, 1, 2, 3]
    assert all(before == after for before, after in seen.values())
    assert (driver.world_size(), driver.local_size("host-1"), driver.local_size("host-9")) == (4, 2, 0)
    assert driver.finished()


def test_at_most_the_largest_number_of_workers_starts(make: Callable[..., ElasticDriver]) -> None:
    assert len(run(make({"a": 4, "b": 4}, most=3), lambda *_: (0, time.time()))) == 3


def test_the_host_of_a_failed_worker_is_excluded(make: Callable[..., ElasticDriver]) -> None:
    """The other worker there loses its rank and its event is set; the others move up."""
    driver, seen, ended = make({"host-1": 2, "host-2": 2}), {}, threading.Event()

    def worker(slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        host, local_rank = slot.hostname, slot.local_rank
        if (host, local_rank) == ("host-1", 0):
            return 1, time.time()
        driver.record_ready(host, local_rank)
        seen[slot.rank] = driver.get_slot_info(host, local_rank)
        if host == "host-1":
            assert events[1].wait(TIMEOUT_S)
            ended.set()
        return 0, time.time()

    assert run(driver, worker) == {"host-2[0]": 0, "host-2[1]": 0}
    assert ended.is_set()
    assert seen[1] == INVALID_SLOT_INFO
    assert [(seen[rank].rank, seen[rank].size, seen[rank].cross_size) for rank in (2, 3)] == [(0, 2, 1), (1, 2, 1)]
    assert not driver.has_rank_assignment("host-1", 1)
    coordinator = driver.get_coordinator_info()
    assert coordinator is not None
    assert coordinator.hostname == "host-2"


def test_a_worker_that_was_ready_may_fail(make: Callable[..., ElasticDriver]) -> None:
    """Its failure takes the place of READY, for which its other thread still waits."""
    driver = make({"host-1": 1, "host-2": 2})
    errors: list[BaseException] = []
    threads: list[threading.Thread] = []

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        if slot.hostname == "host-1":

            def ready() -> None:
                try:
                    driver.record_ready("host-1", 0)
                except RuntimeError as error:
                    errors.append(error)

            threads.append(threading.Thread(target=ready))
            threads[0].start()
            while driver._worker_registry.count(READY) == 0:
                time.sleep(0.01)
            return 1, time.time()
        while driver._worker_registry.count(FAILURE) == 0:
            time.sleep(0.01)
        driver.record_ready(slot.hostname, slot.local_rank)
        return 0, time.time()

    assert run(driver, worker, least=3) == {"host-2[0]": 0, "host-2[1]": 0}
    threads[0].join(60)
    assert [str(error).partition(":")[0] for error in errors] == ["READY of host-1[0] is overridden by FAILURE"]


def test_ready_is_overridden_for_a_thread_that_wakes_in_the_next_round() -> None:
    """The next round has cleared the states by then, which must not make the failed worker ready for it."""
    driver, hosts = mock.Mock(), mock.Mock()
    driver.finished.return_value = False
    hosts.is_blacklisted.side_effect = lambda host: host == "host-1" and hosts.blacklist.called
    registry = WorkerStateRegistry(driver, hosts)
    driver.resume.side_effect = lambda: registry.reset(1)
    registry.reset(2)
    errors: list[str] = []

    class Late(threading.Condition):
        """Wakes the thread that is ready after the next round has begun."""

        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            if threading.current_thread() is thread:
                super().wait_for(lambda: registry.last_rendezvous() == 2, TIMEOUT_S)
            return super().wait_for(predicate, timeout)

    def ready() -> None:
        try:
            registry.record_ready("host-1", 0)
        except RuntimeError as error:
            errors.append(str(error))

    registry._changed = Late()
    thread = threading.Thread(target=ready)
    failed = threading.Thread(target=registry.record_failure, args=("host-1", 0))
    thread.start()
    while registry.count(READY) == 0:
        time.sleep(0.01)
    failed.start()
    while registry.count(FAILURE) == 0:
        time.sleep(0.01)
    registry.record_ready("host-2", 0)
    thread.join(TIMEOUT_S)
    failed.join(TIMEOUT_S)
    assert errors == ["READY of host-1[0] is overridden by FAILURE: its process ended"]


def test_added_hosts_get_workers_with_higher_ranks(make: Callable[..., ElasticDriver]) -> None:
    hosts, seen = FixedHosts({"host-1": 2}), {}
    driver = make(hosts)

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        if slot.hostname == "host-1":
            hosts.set({"host-0": 2, "host-1": 2})
            driver.wait_for_available_slots(4)
            driver.record_ready(slot.hostname, slot.local_rank)
        seen[slot.rank] = driver.get_slot_info(slot.hostname, slot.local_rank)
        return 0, time.time()

    assert sorted(run(driver, worker)) == ["host-0[0]", "host-0[1]", "host-1[0]", "host-1[1]"]
    assert {rank: (slot.rank, slot.size, slot.hostname) for rank, slot in seen.items()} == {
        0: (0, 4, "host-1"),
        1: (1, 4, "host-1"),
        2: (2, 4, "host-0"),
        3: (3, 4, "host-0"),
    }


def test_all_workers_fail(make: Callable[..., ElasticDriver]) -> None:
    driver = make({"host-1": 2, "host-2": 2})

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        return 1, time.time()

    assert list(run(driver, worker).values()) == [1, 1, 1, 1]


def test_a_worker_on_each_host_fails(make: Callable[..., ElasticDriver]) -> None:
    driver = make({"host-1": 2, "host-2": 2})

    def worker(slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        if slot.local_rank == 0:
            return 1, time.time()
        driver.record_ready(slot.hostname, slot.local_rank)
        assert events[0].wait(TIMEOUT_S)
        return 1, time.time()

    # Both hosts are excluded, so the other workers there have no rank when they end.
    assert run(driver, worker) == {"host-1[0]": 1, "host-2[0]": 1}


def test_success_of_one_worker_ends_the_others(make: Callable[..., ElasticDriver]) -> None:
    driver = make({"host-1": 2, "host-2": 2})

    def worker(slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        if slot.rank == 0:
            return 0, time.time()
        driver.record_ready(slot.hostname, slot.local_rank)
        assert events[0].wait(TIMEOUT_S)
        return 1, time.time()

    assert sorted(run(driver, worker).values()) == [0, 1, 1, 1]


def test_a_worker_that_cannot_be_started_has_failed(make: Callable[..., ElasticDriver]) -> None:
    def worker(slot: Any, _: Any) -> tuple[int, float]:
        raise OSError("no such program")

    assert run(make({"a": 2}), worker) == {"a[0]": 1, "a[1]": 1}


@pytest.mark.parametrize("limit", [0, 1])
def test_the_number_of_rounds_is_limited(make: Callable[..., ElasticDriver], limit: int) -> None:
    driver, rounds = make({"a": 2}, reset_limit=limit), []

    def worker(slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        while not events[0].is_set():
            driver.record_ready(slot.hostname, slot.local_rank)
            rounds.append(slot.rank)
        return 1, time.time()

    run(driver, worker)
    message = driver.get_results().error_message
    assert message == f"the number of resets during elastic job exceeded limit: {limit}"
    assert len(rounds) == 2 * (limit + 1)


def test_a_host_of_the_previous_round_must_remain(make: Callable[..., ElasticDriver]) -> None:
    hosts = FixedHosts({"host-1": 2})
    driver = make(hosts)

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        hosts.set({"host-2": 2})
        while driver._host_manager.current_hosts.available_hosts != {"host-2"}:
            time.sleep(0.01)
        driver.record_ready(slot.hostname, slot.local_rank)
        return 1, time.time()

    run(driver, worker)
    assert "No hosts from previous set remaining" in str(driver.get_results().error_message)


def test_a_slot_is_that_of_one_round(make: Callable[..., ElasticDriver], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the next round, which is without its host, begins while it is looked up."""
    driver = make({"a": 2})
    local_size = driver.local_size

    def then_the_next_round_begins(host: str) -> int:
        size = local_size(host)
        driver._host_assignments = {}
        return size

    def worker(slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        assert events[0].wait(TIMEOUT_S)
        return 0, time.time()

    driver.wait_for_available_slots(2)
    driver.start(2, worker)
    monkeypatch.setattr(driver, "local_size", then_the_next_round_begins)
    assert driver.get_slot_info("a", 1) == driver._rank_assignments[1]
    driver._host_assignments = {}
    assert driver.get_slot_info("a", 1) == INVALID_SLOT_INFO


# === Waiting for hosts ===


class Found(discovery.HostDiscovery):
    """Returns or raises one after the other; the last one again and again."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return dict(result)


def test_it_waits_for_slots_and_hosts(make: Callable[..., ElasticDriver]) -> None:
    found = [{"host-1": 4}, {"host-1": 4, "host-2": 8}, {"host-1": 4, "host-2": 8, "host-3": 4}]
    assert make(Found(*found)).wait_for_available_slots(16).count_available_slots() == 16
    assert make(Found(*found)).wait_for_available_slots(2, min_hosts=2).count_available_slots() >= 12


def test_the_timeout_names_both_numbers(make: Callable[..., ElasticDriver], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make({"a": 1})
    driver.wait_for_available_slots(1)  # so that the short timeout is not that of the first discovery
    driver._timeout = 0.2
    with pytest.raises(TimeoutException) as caught:
        driver.wait_for_available_slots(3)
    for words in ("Timed out waiting for minimum number of slots", "there are 1", "3 slots on 1 or more hosts", "0.2"):
        assert words in str(caught.value)
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "7")
    assert make({"a": 1}, timeout=None)._timeout == 7
    monkeypatch.delenv("HOROVOD_ELASTIC_TIMEOUT")
    assert make({"a": 1}, timeout=None)._timeout == 600
    monkeypatch.setattr("horovod.runner.elastic.driver.ELASTIC_TIMEOUT_SECS", 3)
    assert make({"a": 1}, timeout=None)._timeout == 3


def test_the_first_failure_of_discovery_ends_the_job(make: Callable[..., ElasticDriver]) -> None:
    driver = make(Found(RuntimeError("no such script"), {"a": 2}))
    with pytest.raises(RuntimeError, match="the job has been stopped: no such script"):
        driver.wait_for_available_slots(1)
    assert driver.get_results().error_message == "no such script"


def test_later_failures_of_discovery_are_logged(
    make: Callable[..., ElasticDriver], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    driver = make(Found({"a": 1}, RuntimeError("a moment"), ValueError("nonsense"), {"a": 1, "b": 1}))
    assert driver.wait_for_available_slots(2).available_hosts == {"a", "b"}
    assert [text for text in ("a moment", "nonsense") if text not in caplog.text] == []


# === Hosts ===


def test_changes_of_hosts() -> None:
    manager = HostManager(Found({"a": 2}, {"a": 2, "b": 1}, {"b": 1, "a": 2}, {"b": 2}, {"c": 1, "b": 1}, {}))
    assert manager.current_hosts.available_hosts == set()
    changes = []
    for _ in range(6):
        changes.append(manager.update_available_hosts())
    mixed, added = HostUpdateResult.mixed, HostUpdateResult.added
    assert changes == [added, added, HostUpdateResult.no_update, mixed, mixed, HostUpdateResult.removed]
    assert manager.current_hosts.get_slots("b") == 0


def test_excluded_hosts_have_no_slots() -> None:
    manager = HostManager(Found({"a": 2, "b": 1}, {"a": 2, "b": 1, "c": 4}))
    manager.update_available_hosts()
    event = manager.get_host_event("a")
    manager.blacklist("a")
    assert event.is_set()
    assert not manager.get_host_event("a").is_set()
    assert manager.is_blacklisted("a")
    assert manager.current_hosts.host_assignment_order == ["b"]
    assert manager.current_hosts.count_available_slots() == 1
    assert manager.update_available_hosts() == HostUpdateResult.added
    assert manager.current_hosts.host_assignment_order == ["b", "c"]


def test_an_excluded_host_returns_after_its_cooldown(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = mock.Mock(return_value=1000.0)
    monkeypatch.setattr(discovery.time, "time", clock)
    monkeypatch.setattr(discovery.random, "uniform", lambda low, high: high / 2)
    manager = HostManager(FixedHosts({"a": 1, "b": 1}), cooldown_range=(10, 100))
    manager.update_available_hosts()
    waits = []
    for _ in range(5):
        manager.blacklist("a")
        manager.blacklist("a")  # does not count during the cooldown
        began = clock.return_value
        while manager.update_available_hosts() == HostUpdateResult.no_update:
            assert manager.current_hosts.available_hosts == {"b"}
            clock.return_value += 1
        waits.append(clock.return_value - began)
        assert manager.current_hosts.host_assignment_order == ["b", "a"]
    # The first one is the lower limit, as the documentation says, and half of it for chance.
    assert waits == [15, 25, 45, 85, 100]


def test_a_host_without_cooldown_stays_excluded() -> None:
    state = HostState()
    state.blacklist()
    assert (state.is_blacklisted(), state.is_resurrected()) == (True, False)
    state.whitelist()
    assert not state.is_blacklisted()


@pytest.mark.parametrize("limits", [(0, 10), (10, 5), (1, 3601)])
def test_an_impossible_cooldown_is_a_value_error(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"the cooldown range is {limits[0]} s to {limits[1]} s"):
        HostManager(FixedHosts({}), limits)


def test_the_order_of_hosts_is_kept() -> None:
    order = HostManager.order_available_hosts(["a", "b", "c"], [])
    assert order == ["a", "b", "c"]
    assert HostManager.order_available_hosts(["d", "c", "a"], order) == ["a", "c", "d"]
    assert DiscoveredHosts({"a": 1}, ["a"]).host_slots == {"a": 1}


@pytest.fixture
def script(tmp_path: pathlib.Path) -> Callable[..., HostDiscoveryScript]:
    """Makes the discovery of a shell script."""

    def make(text: str, slots: int | None = None) -> HostDiscoveryScript:
        path = tmp_path / "hosts.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return HostDiscoveryScript(str(path), slots)

    return make


def test_a_script_prints_hosts(script: Callable[..., HostDiscoveryScript]) -> None:
    printed = "echo host-1:4; echo; echo '  [fd00::1]:2  '; echo 10.0.0.7; echo 10.0.0.7:3"
    assert script(printed, 3).find_available_hosts_and_slots() == {"host-1": 4, "[fd00::1]": 2, "10.0.0.7": 3}
    assert script("true").find_available_hosts_and_slots() == {}
    with pytest.raises(NotImplementedError):
        discovery.HostDiscovery().find_available_hosts_and_slots()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("echo oops >&2; exit 3", RuntimeError, r"Failed to execute discovery script: .*hosts.sh. Exit code: 3. oops"),
        ("echo a:1; echo who knows", RuntimeError, "printed 'who knows', which is not `host:slots`"),
        ("echo a:-1", RuntimeError, "printed 'a:-1'"),
        ("echo a:1; echo a:2", RuntimeError, "printed host a twice, with 1 and 2 slots"),
        ("echo a", ValueError, "printed 'a' without slots; print a:<slots>, or give --slots-per-host"),
    ],
)
def test_a_script_fails(
    script: Callable[..., HostDiscoveryScript], text: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        script(text).find_available_hosts_and_slots()


def test_a_missing_script_fails() -> None:
    with pytest.raises(RuntimeError, match="Failed to execute discovery script: /no/such"):
        HostDiscoveryScript("/no/such", 1).find_available_hosts_and_slots()


def test_a_script_that_hangs_is_ended(
    script: Callable[..., HostDiscoveryScript], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DISCOVERY_SCRIPT_TIMEOUT_SECS", 0.3)
    with pytest.raises(RuntimeError, match=r"took longer than 0.3 s; it should print the hosts and end"):
        script("echo a:1; sleep 60").find_available_hosts_and_slots()


# === Notifications ===


class Receiver:
    """A state that records notifications."""

    def __init__(self) -> None:
        self.changes: list[int] = []

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        assert timestamp > 0
        self.changes.append(update_res)


def test_rank_0_is_notified_of_changes(make: Callable[..., ElasticDriver]) -> None:
    """By a service in the worker, whose address it registers at a rendezvous server."""
    hosts, changes = FixedHosts({"host-1": 2}), {}
    driver, server = make(hosts), RendezvousServer()
    port = server.start(create_rendezvous_handler(driver))
    both_have_seen = threading.Barrier(2)

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        manager, receiver = WorkerNotificationManager(), Receiver()
        manager.init("127.0.0.1", port, "lo", slot.hostname, slot.local_rank)
        manager.init("127.0.0.1", port, "lo", slot.hostname, slot.local_rank)
        manager.register_listener(receiver)
        driver.record_ready(slot.hostname, slot.local_rank)
        if slot.rank == 0:
            hosts.set({"host-1": 2, "host-2": 2})
        driver.wait_for_available_slots(4)
        both_have_seen.wait(TIMEOUT_S)
        if slot.rank == 0:
            hosts.set({"host-2": 2})
        while driver._host_manager.current_hosts.count_available_slots() > 2:
            time.sleep(0.01)
        deadline = time.monotonic() + TIMEOUT_S
        while slot.rank == 0 and len(receiver.changes) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        changes[slot.rank] = receiver.changes
        manager.shutdown()
        return 0, time.time()

    try:
        run(driver, worker)
    finally:
        server.stop()
    assert changes == {0: [HostUpdateResult.added, HostUpdateResult.removed], 1: []}


def test_a_worker_registers_by_its_variables(
    make: Callable[..., ElasticDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, server = make({"a": 2}), RendezvousServer()
    port = server.start(create_rendezvous_handler(driver))
    manager = WorkerNotificationManager()
    manager.init()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    manager.init()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    monkeypatch.setenv("HOROVOD_HOSTNAME", "a")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    receiver, slot = Receiver(), mock.Mock(hostname="a", local_rank=1)
    manager.register_listener(receiver)
    try:
        assert driver.get_worker_client(slot) is None
        manager.init()
        client = driver.get_worker_client(slot)
        assert client is not None
        client.notify_hosts_updated(1.0, HostUpdateResult.mixed)
    finally:
        manager.shutdown()
        server.stop()
    assert receiver.changes == [HostUpdateResult.mixed]


def test_a_change_that_moves_no_rank_notifies_nobody(
    make: Callable[..., ElasticDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, hosts = mock.Mock(), FixedHosts({"a": 2})
    monkeypatch.setattr(ElasticDriver, "get_worker_client", lambda *_: client)
    monkeypatch.setattr("horovod.runner.elastic.driver.DISCOVER_HOSTS_FREQUENCY_SECS", 0.01)
    driver = make(hosts, most=2)

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        hosts.set({"a": 2, "b": 2})
        driver.wait_for_available_slots(4)
        return 0, time.time()

    run(driver, worker)
    client.notify_hosts_updated.assert_not_called()


class PolledHosts(FixedHosts):
    """Hosts that a test changes, and then waits until the driver has found them."""

    def __init__(self, host_slots: dict[str, int]) -> None:
        super().__init__(host_slots)
        self._polled = threading.Condition()
        self._polls = 0

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        with self._polled:
            self._polls += 1
            self._polled.notify_all()
        return super().find_available_hosts_and_slots()

    def change(self, host_slots: dict[str, int]) -> None:
        self.set(host_slots)
        with self._polled:
            # The next poll finds the hosts, and the one after that begins when the driver is through with them.
            after = self._polls + 2
            assert self._polled.wait_for(lambda: self._polls >= after, TIMEOUT_S)


class Notified:
    """A client that counts notifications."""

    def __init__(self) -> None:
        self.changes: list[int] = []
        self._changed = threading.Condition()

    def notify_hosts_updated(self, timestamp: float, update_res: int) -> None:
        with self._changed:
            self.changes.append(update_res)
            self._changed.notify_all()

    def wait_for(self, count: int) -> tuple[int, float]:
        """Waits for so many notifications. Returns what a worker does: status 0 if they come."""
        with self._changed:
            return int(not self._changed.wait_for(lambda: len(self.changes) >= count, TIMEOUT_S)), time.time()


def test_rank_0_is_notified_of_a_host_that_is_found_while_the_round_begins(
    make: Callable[..., ElasticDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round begins without it."""
    hosts, client = PolledHosts({"a": 2}), Notified()
    driver = make(hosts)
    monkeypatch.setattr(driver, "get_worker_client", lambda slot: client)
    driver._rendezvous.init.side_effect = lambda slots: hosts.change({"a": 2, "b": 2})
    assert run(driver, lambda *_: client.wait_for(1)) == {"a[0]": 0, "a[1]": 0}
    assert client.changes == [HostUpdateResult.added]


def test_rank_0_is_notified_when_it_registers(
    make: Callable[..., ElasticDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts have changed before that."""
    hosts, client, registered = PolledHosts({"a": 2}), Notified(), threading.Event()
    driver = make(hosts)
    monkeypatch.setattr(driver, "get_worker_client", lambda slot: client if registered.is_set() else None)

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        if slot.rank == 0:
            hosts.change({"a": 2, "b": 2})
            registered.set()
        return client.wait_for(1)

    assert run(driver, worker) == {"a[0]": 0, "a[1]": 0}
    assert client.changes == [HostUpdateResult.added]


def test_rank_0_is_notified_again_if_the_next_round_begins_without_the_change(
    make: Callable[..., ElasticDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round got its hosts before, and rank 0 was in the round before when it was notified."""
    hosts, client = PolledHosts({"a": 2}), Notified()
    driver = make(hosts)
    monkeypatch.setattr(driver, "get_worker_client", lambda slot: client)
    wait_for_available_slots = driver.wait_for_available_slots

    def then_a_host_comes(*arguments: Any) -> DiscoveredHosts:
        found = wait_for_available_slots(*arguments)
        if driver.get_coordinator_info() is not None:
            hosts.change({"a": 2, "b": 2})
        return found

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        return client.wait_for(2)

    monkeypatch.setattr(driver, "wait_for_available_slots", then_a_host_comes)
    assert run(driver, worker) == {"a[0]": 0, "a[1]": 0}
    assert client.changes == [HostUpdateResult.added] * 2


def test_ranks_are_served_when_the_next_round_begins(make: Callable[..., ElasticDriver]) -> None:
    driver, server = make({"a": 2}), RendezvousServer()
    port = server.start(create_rendezvous_handler(driver))

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        answer = read_data_from_kvstore("127.0.0.1", port, "rank_and_size", f"{slot.hostname}:{slot.local_rank}")
        return int(answer.decode() != slot.to_response_string()), time.time()

    try:
        assert run(driver, worker) == {"a[0]": 0, "a[1]": 0}
        put_data_into_kvstore("127.0.0.1", port, "a scope", "key", b"value")
        assert read_data_from_kvstore("127.0.0.1", port, "a scope", "key") == b"value"
        with pytest.raises(KeyError, match="a scope/other"):
            read_data_from_kvstore("127.0.0.1", port, "a scope", "other")
        with pytest.raises(OSError, match="answered with 500: ValueError"):
            read_data_from_kvstore("127.0.0.1", port, "rank_and_size", "a:first")
    finally:
        server.stop()


def test_the_store_rejects_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RendezvousServer()
    port = server.start()
    try:
        put_data_into_kvstore("127.0.0.1", port, "scope", "key", b"value")
        digest = mock.Mock(side_effect=["bm8=", "bm8="])
        monkeypatch.setattr("horovod.runner.http.http_client.digest", digest)
        with pytest.raises(OSError, match="not authenticated by the key of the job"):
            put_data_into_kvstore("127.0.0.1", port, "scope", "key", b"other")
        monkeypatch.undo()
        assert read_data_from_kvstore("127.0.0.1", port, "scope", "key") == b"value"
    finally:
        server.stop()


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has made the key of the store. What the test makes is removed."""
    monkeypatch.setenv(secret.HOROVOD_SECRET_KEY, "")
    monkeypatch.delenv(secret.HOROVOD_SECRET_KEY)


@pytest.mark.usefixtures("no_key")
def test_threads_that_make_the_key_at_once_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers send their first requests: one makes the key, and the other one takes it."""
    digests: dict[str, str] = {}

    def send(name: str) -> None:
        digests[name] = http_server.digest("PUT", "/scope/key", b"value")

    second = threading.Thread(target=send, args=("second",), daemon=True)

    def make() -> bytes:
        if threading.current_thread() is not second:
            second.start()
            second.join(0.5)  # by then it has made its own key, or it waits for this one
        return bytes([len(digests)]) * secret.SECRET_LENGTH

    monkeypatch.setattr(secret, "make_secret_key", make)
    send("first")
    second.join(TIMEOUT_S)
    assert digests["first"] == digests["second"] == http_server.digest("PUT", "/scope/key", b"value")


@pytest.mark.usefixtures("no_key")
def test_processes_inherit_the_key_of_a_server() -> None:
    """Also those that start before the first request."""
    server = RendezvousServer()
    server.start()
    try:
        inherited = os.environ[secret.HOROVOD_SECRET_KEY]
        http_server.digest("PUT", "/scope/key", b"value")
        assert os.environ[secret.HOROVOD_SECRET_KEY] == inherited
    finally:
        server.stop()


def test_a_service_accepts_its_key_only() -> None:
    manager, receiver = WorkerNotificationManager(), Receiver()
    manager.register_listener(receiver)
    service = WorkerNotificationService(b"k" * 32, None, manager)
    try:
        WorkerNotificationClient(service.addresses(), b"k" * 32).notify_hosts_updated(1.0, HostUpdateResult.added)
        with pytest.raises(OSError, match="rejected the notification"):
            WorkerNotificationClient(service.addresses(), b"x" * 32).notify_hosts_updated(2.0, HostUpdateResult.added)
    finally:
        service.shutdown()
    assert receiver.changes == [HostUpdateResult.added]
    with pytest.raises(OSError, match="refused"):
        WorkerNotificationClient(service.addresses(), b"k" * 32).notify_hosts_updated(1.0, 0)


def test_notifications_stay_on_this_host() -> None:
    with pytest.raises(ValueError, match="notifications are not encrypted, so they stay on this host"):
        WorkerNotificationClient({"eth0": [("10.0.0.1", 1)]}, b"k")


# === States and settings ===


def test_states_of_a_round() -> None:
    driver, manager = mock.Mock(), HostManager(FixedHosts({}))
    driver.finished.return_value = False
    registry = WorkerStateRegistry(driver, manager)
    registry.reset(3)
    threads = [
        threading.Thread(target=record, args=("a", slot), daemon=True)
        for slot, record in enumerate([registry.record_ready, registry.record_failure])
    ]
    for thread in threads:
        thread.start()
    while registry.total_count() < 2:
        time.sleep(0.01)
    assert (registry.get(READY), registry.get(FAILURE), registry.get(SUCCESS)) == ({("a", 0)}, {("a", 1)}, set())
    assert registry.size() == 3
    driver.stop.assert_not_called()
    assert registry.record_success("b", 0) == registry.last_rendezvous() == 1
    driver.stop.assert_called_once_with()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_settings() -> None:
    settings = ElasticSettings(FixedHosts({"a": 1}), 1, None, 60, 3, cooldown_range=(1, 2), num_proc=2, verbose=2)
    assert settings.elastic
    assert (settings.min_num_proc, settings.max_num_proc, settings.num_proc) == (1, None, 2)
    assert (settings.elastic_timeout, settings.reset_limit, settings.cooldown_range) == (60, 3, (1, 2))
    assert json.dumps(settings.verbose) == "2"
