"""Notifications of Horovod's elastic driver with injected workers and hosts, and its rendezvous server."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from elastic_drivers import TIMEOUT_S, Make, drivers, run

from horovod.runner.common.util import secret
from horovod.runner.elastic.discovery import DiscoveredHosts, FixedHosts
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
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
    from collections.abc import Iterator


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes drivers, which are stopped at the end."""
    with drivers(monkeypatch) as made:
        yield made


class Receiver:
    """A state that records notifications."""

    def __init__(self) -> None:
        self.changes: list[int] = []

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        assert timestamp > 0
        self.changes.append(update_res)


def test_rank_0_is_notified_of_changes(make: Make) -> None:
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


def test_a_worker_registers_by_its_variables(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_change_that_moves_no_rank_notifies_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round begins without it."""
    hosts, client = PolledHosts({"a": 2}), Notified()
    driver = make(hosts)
    monkeypatch.setattr(driver, "get_worker_client", lambda slot: client)
    driver._rendezvous.init.side_effect = lambda slots: hosts.change({"a": 2, "b": 2})
    assert run(driver, lambda *_: client.wait_for(1)) == {"a[0]": 0, "a[1]": 0}
    assert client.changes == [HostUpdateResult.added]


def test_rank_0_is_notified_when_it_registers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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
    make: Make, monkeypatch: pytest.MonkeyPatch
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


def test_ranks_are_served_when_the_next_round_begins(make: Make) -> None:
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
