"""Horovod's elastic driver with injected workers and hosts: rounds, waits for hosts, states."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Callable
from unittest import mock

import pytest
from elastic_drivers import TIMEOUT_S, Found, Make, drivers, run

from horovod.runner.common.util.hosts import INVALID_SLOT_INFO
from horovod.runner.common.util.timeout import TimeoutException
from horovod.runner.elastic.discovery import FixedHosts, HostManager
from horovod.runner.elastic.registration import FAILURE, READY, SUCCESS, WorkerStateRegistry
from horovod.runner.elastic.settings import ElasticSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes drivers, which are stopped at the end."""
    with drivers(monkeypatch) as made:
        yield made


# === Rounds ===


def test_all_workers_succeed(make: Make) -> None:
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


def test_at_most_the_largest_number_of_workers_starts(make: Make) -> None:
    assert len(run(make({"a": 4, "b": 4}, most=3), lambda *_: (0, time.time()))) == 3


def test_the_host_of_a_failed_worker_is_excluded(make: Make) -> None:
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


def test_a_worker_that_was_ready_may_fail(make: Make) -> None:
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


def test_added_hosts_get_workers_with_higher_ranks(make: Make) -> None:
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


def test_all_workers_fail(make: Make) -> None:
    driver = make({"host-1": 2, "host-2": 2})

    def worker(slot: Any, _: Any) -> tuple[int, float]:
        driver.record_ready(slot.hostname, slot.local_rank)
        return 1, time.time()

    assert list(run(driver, worker).values()) == [1, 1, 1, 1]


def test_a_worker_on_each_host_fails(make: Make) -> None:
    driver = make({"host-1": 2, "host-2": 2})

    def worker(slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        if slot.local_rank == 0:
            return 1, time.time()
        driver.record_ready(slot.hostname, slot.local_rank)
        assert events[0].wait(TIMEOUT_S)
        return 1, time.time()

    # Both hosts are excluded, so the other workers there have no rank when they end.
    assert run(driver, worker) == {"host-1[0]": 1, "host-2[0]": 1}


def test_success_of_one_worker_ends_the_others(make: Make) -> None:
    driver = make({"host-1": 2, "host-2": 2})

    def worker(slot: Any, events: Sequence[threading.Event]) -> tuple[int, float]:
        if slot.rank == 0:
            return 0, time.time()
        driver.record_ready(slot.hostname, slot.local_rank)
        assert events[0].wait(TIMEOUT_S)
        return 1, time.time()

    assert sorted(run(driver, worker).values()) == [0, 1, 1, 1]


def test_a_worker_that_cannot_be_started_has_failed(make: Make) -> None:
    def worker(slot: Any, _: Any) -> tuple[int, float]:
        raise OSError("no such program")

    assert run(make({"a": 2}), worker) == {"a[0]": 1, "a[1]": 1}


@pytest.mark.parametrize("limit", [0, 1])
def test_the_number_of_rounds_is_limited(make: Make, limit: int) -> None:
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


def test_a_host_of_the_previous_round_must_remain(make: Make) -> None:
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


def test_a_slot_is_that_of_one_round(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_waits_for_slots_and_hosts(make: Make) -> None:
    found = [{"host-1": 4}, {"host-1": 4, "host-2": 8}, {"host-1": 4, "host-2": 8, "host-3": 4}]
    assert make(Found(*found)).wait_for_available_slots(16).count_available_slots() == 16
    assert make(Found(*found)).wait_for_available_slots(2, min_hosts=2).count_available_slots() >= 12


def test_the_timeout_names_both_numbers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_first_failure_of_discovery_ends_the_job(make: Make) -> None:
    driver = make(Found(RuntimeError("no such script"), {"a": 2}))
    with pytest.raises(RuntimeError, match="the job has been stopped: no such script"):
        driver.wait_for_available_slots(1)
    assert driver.get_results().error_message == "no such script"


def test_later_failures_of_discovery_are_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    driver = make(Found({"a": 1}, RuntimeError("a moment"), ValueError("nonsense"), {"a": 1, "b": 1}))
    assert driver.wait_for_available_slots(2).available_hosts == {"a", "b"}
    assert [text for text in ("a moment", "nonsense") if text not in caplog.text] == []


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
