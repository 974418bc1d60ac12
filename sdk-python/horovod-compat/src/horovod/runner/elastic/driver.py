"""Drives the rounds of an elastic job whose workers a function of the program starts."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

from horovod.runner.common.util.hosts import INVALID_SLOT_INFO, HostInfo, SlotInfo, get_host_assignments
from horovod.runner.common.util.timeout import Timeout
from horovod.runner.elastic import constants
from horovod.runner.elastic.constants import DISCOVER_HOSTS_FREQUENCY_SECS, ELASTIC_TIMEOUT_SECS
from horovod.runner.elastic.discovery import DiscoveredHosts, HostDiscovery, HostManager
from horovod.runner.elastic.registration import WorkerStateRegistry
from horovod.runner.elastic.worker import WorkerNotificationClient
from ronde.elastic import HostUpdateResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_log = logging.getLogger("horovod.elastic")
# Runs a worker until it ends. Its arguments are the slot, and events of which each ends the worker; it returns the exit
# status and the time of the end.
CreateWorker = Callable[[SlotInfo, "Sequence[threading.Event]"], "tuple[int, float]"]
Assignments = dict  # of slots by host


@dataclass
class Results:
    """The end of a job.

    error_message  -- why it was stopped; None if its workers ended it
    worker_results -- exit status and time of the end of each worker of the last round, by `host[local rank]`
    """

    error_message: str | None = None
    worker_results: dict[str, tuple[int, float]] = field(default_factory=dict)


class ResultsRecorder:
    """Collects the ends of workers, until the threads that run them have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._results = Results()

    def expect(self, worker_thread: threading.Thread) -> None:
        """Adds a thread to wait for."""
        with self._lock:
            self._threads.append(worker_thread)

    def set_error_message(self, error_message: str | None) -> None:
        """Records why the job was stopped. The first reason is kept."""
        with self._lock:
            self._results.error_message = self._results.error_message or error_message

    def add_result(self, key: str, value: tuple[int, float]) -> None:
        """Records the end of a worker. The first one is kept."""
        with self._lock:
            self._results.worker_results.setdefault(key, value)

    def get_results(self) -> Results:
        """Returns the results, when all threads have ended."""
        while True:
            with self._lock:
                if not self._threads:
                    return self._results
                thread = self._threads.pop(0)
            thread.join()


class ElasticDriver:
    """Finds hosts, assigns ranks, and starts workers in rounds, until the workers have ended.

    rendezvous     -- an object with `init(slots)`, called with the slots of each round, and `stop()`
    discovery      -- finds the hosts
    min_num_proc   -- the smallest number of workers
    max_num_proc   -- the largest one; None for no limit
    timeout        -- how long to wait for hosts, in seconds; default: HOROVOD_ELASTIC_TIMEOUT, else 600
    reset_limit    -- how many further rounds there may be; None for any number
    cooldown_range -- how long hosts are excluded after a failure, in seconds; None for ever
    verbose        -- how much clients print

    Hosts keep their order, so the oldest one has rank 0. A thread polls for hosts each second. If the first attempt
    fails, the job stops; later failures are logged, and the hosts stay as they were.
    """

    def __init__(
        self,
        rendezvous: Any,
        discovery: HostDiscovery,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: float | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        verbose: int = 0,
    ) -> None:
        self._rendezvous = rendezvous
        self._host_manager = HostManager(discovery, cooldown_range)
        self._min_num_proc, self._max_num_proc = min_num_proc, max_num_proc
        self._timeout = timeout or _timeout_s()
        self._verbose = verbose
        self._host_assignments: Assignments[str, list[SlotInfo]] = {}
        self._rank_assignments: dict[int, SlotInfo] = {}
        self._world_size = 0
        self._assigning = threading.Lock()  # held while these three change
        self._hosts_changed = threading.Condition()
        self._create_worker_fn: CreateWorker | None = None
        self._worker_clients: dict[tuple[str, int], WorkerNotificationClient] = {}
        self._worker_registry = WorkerStateRegistry(self, self._host_manager, reset_limit)
        self._results = ResultsRecorder()
        self._shutdown = threading.Event()
        # Of the thread that finds hosts: how they have changed, as bits of `HostUpdateResult`. Rank 0 has been notified
        # of some of it, in the round with these assignments.
        self._changes = self._notified = HostUpdateResult.no_update
        self._notified_in: Assignments[str, list[SlotInfo]] = self._host_assignments
        self._discovery_error: str | None = None
        self._discovery_thread = threading.Thread(target=self._discover_hosts, name="host discovery", daemon=True)
        self._discovery_thread.start()

    def start(self, num_proc: int, create_worker_fn: CreateWorker) -> None:
        """Waits for this many slots, then starts a worker in a thread for each slot."""
        self._create_worker_fn = create_worker_fn
        self._activate_workers(num_proc)

    def resume(self) -> None:
        """Begins the next round, with workers on new slots."""
        self._activate_workers(self._min_num_proc)

    def stop(self, error_message: str | None = None) -> None:
        """Stops the job: the event of all workers is set, and no further round begins."""
        self._results.set_error_message(error_message)
        self._shutdown.set()
        with self._hosts_changed:
            self._hosts_changed.notify_all()
        self._rendezvous.stop()
        if threading.current_thread() is not self._discovery_thread:
            self._discovery_thread.join(constants.current("DISCOVERY_SCRIPT_TIMEOUT_SECS", {}))

    def finished(self) -> bool:
        """Returns whether the job has been stopped."""
        return self._shutdown.is_set()

    def get_results(self) -> Results:
        """Returns how the workers of the last round ended, when all workers have ended."""
        return self._results.get_results()

    def register_worker_server(
        self, host: str, slot: int, addresses: Mapping[str, Sequence[tuple[str, int]]], secret_key: bytes
    ) -> None:
        """Sets where the worker on a slot is notified of changed hosts.

        addresses  -- as `WorkerNotificationService.addresses` returns them
        secret_key -- authenticates the notifications
        """
        self._worker_clients[(host, slot)] = WorkerNotificationClient(addresses, secret_key, self._verbose)

    def get_worker_client(self, slot_info: SlotInfo) -> WorkerNotificationClient | None:
        """Returns the client for a worker's notifications; None if it has not registered."""
        return self._worker_clients.get((slot_info.hostname, slot_info.local_rank))

    def record_ready(self, host: str, slot: int) -> None:
        """Records that the worker on a slot waits for the next round. Returns when that has begun."""
        self._worker_registry.record_ready(host, slot)

    def world_size(self) -> int:
        """Returns the number of workers of the round."""
        return self._world_size

    def local_size(self, host: str) -> int:
        """Returns the number of workers of the round on a host."""
        return len(self._host_assignments.get(host, []))

    def has_rank_assignment(self, host: str, slot: int) -> bool:
        """Returns whether a slot has a rank in the round."""
        return not self._host_manager.is_blacklisted(host) and slot < self.local_size(host)

    def get_slot_info(self, host: str, slot: int) -> SlotInfo:
        """Returns a slot with its ranks and sizes, or with -1 for each of them if it has no rank in the round."""
        # Another thread may begin the next round meanwhile, which may be without this host.
        slots: list[SlotInfo] = self._host_assignments.get(host, [])
        if self._host_manager.is_blacklisted(host) or slot >= len(slots):
            return INVALID_SLOT_INFO
        return slots[slot]

    def get_coordinator_info(self) -> SlotInfo | None:
        """Returns the slot of rank 0; None before the first round."""
        return self._rank_assignments.get(0)

    @property
    def host_assignments(self) -> Assignments[str, list[SlotInfo]]:
        """The slots of the round, by host."""
        return self._host_assignments

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> DiscoveredHosts:
        """Returns the hosts when they have enough slots.

        Raises TimeoutException with both numbers after the timeout, and RuntimeError if the job stops.
        """
        text = (
            f"Timed out waiting for {{activity}}: {min_num_proc} slots on {min_hosts} or more hosts are needed. Start "
            "more hosts, or lower the number of processes."
        )
        timeout = Timeout(self._timeout, text)
        with self._hosts_changed:
            while True:
                hosts = self._host_manager.current_hosts
                slots = hosts.count_available_slots()
                if slots >= min_num_proc and len(hosts.available_hosts) >= min_hosts:
                    return hosts
                if self._shutdown.is_set():
                    raise RuntimeError(
                        f"the job has been stopped: {self._discovery_error or 'see the errors above for the reason'}"
                    )
                self._hosts_changed.wait(timeout.remaining())
                timeout.check_time_out_for(f"minimum number of slots to become available (there are {slots})")

    def _activate_workers(self, min_num_proc: int) -> None:
        hosts = self.wait_for_available_slots(min_num_proc)
        pending = self._update_host_assignments(hosts)
        self._worker_registry.reset(self.world_size())
        for slot in pending:
            self._start_worker(slot)

    def _update_host_assignments(self, hosts: DiscoveredHosts) -> list[SlotInfo]:
        """Assigns the ranks of a new round. Returns the slots that have no worker yet."""
        running = {(host, slot.local_rank) for host, slots in self._host_assignments.items() for slot in slots}
        by_host, by_rank = self._get_host_assignments(hosts)
        if self._host_assignments and not self._host_assignments.keys() & by_host.keys():
            raise RuntimeError(
                "No hosts from previous set remaining, unable to broadcast state. Keep one host while others are "
                "replaced"
            )
        with self._assigning:
            self._host_assignments = by_host
            self._rank_assignments = {slot.rank: slot for slot in by_rank}
            self._world_size = len(by_rank)
        self._rendezvous.init(by_rank)
        return [slot for slot in by_rank if (slot.hostname, slot.local_rank) not in running]

    def _get_host_assignments(self, hosts: DiscoveredHosts) -> tuple[Assignments[str, list[SlotInfo]], list[SlotInfo]]:
        """Returns the slots by host, and in the order of ranks."""
        infos = [HostInfo(host, hosts.get_slots(host)) for host in hosts.host_assignment_order]
        by_rank = get_host_assignments(infos, self._min_num_proc, self._max_num_proc)
        by_host: Assignments[str, list[SlotInfo]] = {}
        for slot in by_rank:
            by_host.setdefault(slot.hostname, []).append(slot)
        return by_host, by_rank

    def _discover_hosts(self) -> None:
        is_first = True
        while not self._shutdown.is_set():
            try:
                change = self._host_manager.update_available_hosts()
            except Exception as error:
                if is_first:
                    self._stop_for(error)
                    return
                _log.warning("the hosts stay as they were, because finding them failed: %s", error)
            else:
                self._after_discovery(change)
            is_first = False
            self._shutdown.wait(constants.current("DISCOVER_HOSTS_FREQUENCY_SECS", globals()))

    def _stop_for(self, error: Exception) -> None:
        """Stops the job because the first discovery failed: the discovery itself is wrong."""
        _log.error("the job stops, because the first attempt to find hosts failed: %s", error)
        self._discovery_error = str(error)
        self._results.set_error_message(str(error))
        self._shutdown.set()
        with self._hosts_changed:
            self._hosts_changed.notify_all()

    def _after_discovery(self, change: int) -> None:
        hosts = self._host_manager.current_hosts
        # A copy, because another thread may exclude a host meanwhile.
        hosts = DiscoveredHosts(hosts.host_slots, hosts.host_assignment_order)
        try:
            self._notify_workers_host_changes(hosts, change)
        finally:
            if change != HostUpdateResult.no_update:
                with self._hosts_changed:
                    self._hosts_changed.notify_all()

    def _notify_workers_host_changes(self, hosts: DiscoveredHosts, change: int) -> None:
        """Notifies the worker of rank 0, once in each round, if the changes would change the assignment of ranks.

        Changes are kept while there is nobody to notify: a round begins, or the worker has not registered yet.
        """
        self._changes |= change
        with self._assigning:
            assignments, coordinator = self._host_assignments, self.get_coordinator_info()
        if self._notified_in is not assignments:
            # The next round has begun, perhaps with the hosts that were there before the changes.
            self._changes |= self._notified
            self._notified, self._notified_in = HostUpdateResult.no_update, assignments
        next_assignments: Assignments[str, list[SlotInfo]] = {}
        if hosts.count_available_slots() >= self._min_num_proc:
            next_assignments, _ = self._get_host_assignments(hosts)
        if next_assignments == assignments:
            self._changes = self._notified = HostUpdateResult.no_update
            return
        client = None if coordinator is None else self.get_worker_client(coordinator)
        if client is None or self._changes == HostUpdateResult.no_update:
            return
        changes, self._changes = self._changes, HostUpdateResult.no_update
        self._notified |= changes
        try:
            client.notify_hosts_updated(time.time(), changes)
        except Exception as error:
            # The worker may have ended; then its end is recorded and leads to the next round.
            _log.warning("the worker of rank 0 could not be notified of changed hosts: %s", error)

    def _start_worker(self, slot: SlotInfo) -> None:
        create = self._create_worker_fn
        assert create is not None  # `start` has set it
        events = [self._shutdown, self._host_manager.get_host_event(slot.hostname)]

        def run() -> None:
            try:
                status, ended_at = create(slot, events)
            except Exception:
                _log.exception("the worker on %s[%d] could not be run", slot.hostname, slot.local_rank)
                status, ended_at = 1, time.time()
            self._handle_worker_exit(slot, status, ended_at)

        thread = threading.Thread(target=run, name=f"worker {slot.hostname}[{slot.local_rank}]", daemon=True)
        self._results.expect(thread)
        thread.start()

    def _handle_worker_exit(self, slot: SlotInfo, exit_code: int, timestamp: float) -> None:
        host, local_rank = slot.hostname, slot.local_rank
        if not self.has_rank_assignment(host, local_rank):
            _log.debug("%s[%d] ended without a rank", host, local_rank)
            return
        registry = self._worker_registry
        record = registry.record_success if exit_code == 0 else registry.record_failure
        recorded_round = record(host, local_rank)
        if self.finished() and registry.last_rendezvous() == recorded_round:
            self._results.add_result(f"{host}[{local_rank}]", (exit_code, timestamp))


def _timeout_s() -> float:
    text = os.environ.get("HOROVOD_ELASTIC_TIMEOUT")
    return float(text) if text else float(constants.current("ELASTIC_TIMEOUT_SECS", globals()))


__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS", "ELASTIC_TIMEOUT_SECS", "ElasticDriver", "Results", "ResultsRecorder"]
