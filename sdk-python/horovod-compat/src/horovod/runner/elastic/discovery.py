"""Finds the hosts of an elastic job, and excludes those on which processes failed."""

from __future__ import annotations

import io
import logging
import random
import re
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from horovod.runner.common.util import safe_shell_exec
from horovod.runner.elastic import constants
from horovod.runner.elastic.constants import (
    DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS,
    DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS,
)
from ronde.elastic import HostUpdateResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_log = logging.getLogger("horovod.elastic")
_LINE = re.compile(r"(?P<host>[\w.-]+|\[[0-9A-Fa-f:.%\w]+\])(?::(?P<slots>[0-9]+))?")


class HostState:
    """Whether a host is excluded, and until when.

    cooldown_range -- the shortest and the longest time of exclusion, in seconds; None to exclude it for ever

    The first time is the shortest one. It doubles with each further failure, plus a random part of the shortest one.
    Raises ValueError for a range that is not within 1 s and 3600 s.
    """

    def __init__(self, cooldown_range: Sequence[float] | None = None) -> None:
        if cooldown_range is not None:
            self._validate_cooldown_range(cooldown_range)
        self._cooldown_range = cooldown_range
        self._event = threading.Event()
        self._is_blacklisted = False
        self._count = 0
        self._ends_at: float | None = None

    def get_event(self) -> threading.Event:
        """Returns the event that ends the workers of the host; a new one if the last one was set."""
        if self._event.is_set():
            self._event = threading.Event()
        return self._event

    def set_event(self) -> None:
        """Sets the event."""
        self._event.set()

    def blacklist(self) -> None:
        """Excludes the host and ends its workers. Does nothing during a cooldown."""
        self._is_blacklisted = True
        now = time.time()
        if self._ends_at is not None and now < self._ends_at:
            return
        if self._cooldown_range is not None:
            low, high = self._cooldown_range
            delay = low * 2**self._count + random.uniform(0, low)
            self._count += 1
            self._ends_at = now + max(low, min(high, delay))
        self.set_event()

    def whitelist(self) -> None:
        """Ends the exclusion."""
        self._ends_at = None
        self._is_blacklisted = False

    def is_blacklisted(self) -> bool:
        """Returns whether the host is excluded."""
        return self._is_blacklisted

    def is_resurrected(self) -> bool:
        """Returns whether the cooldown is over, so that the host may be used again."""
        return self._is_blacklisted and self._ends_at is not None and time.time() >= self._ends_at

    @staticmethod
    def _validate_cooldown_range(cooldown_range: Sequence[float]) -> None:
        least = constants.current("DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS", globals())
        most = constants.current("DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS", globals())
        low, high = cooldown_range
        if not least <= low <= high <= most:
            raise ValueError(
                f"the cooldown range is {low} s to {high} s; it begins at {least} s or later, and ends at {most} s or "
                "earlier, after it begins"
            )


class DiscoveredHosts:
    """The hosts that were found, and the order in which they get ranks: the oldest first."""

    def __init__(self, host_slots: Mapping[str, int], host_assignment_order: Sequence[str]) -> None:
        self._host_slots = dict(host_slots)
        self._order = list(host_assignment_order)

    @property
    def host_slots(self) -> dict[str, int]:
        """The slots of each host, also of excluded ones."""
        return self._host_slots

    @property
    def available_hosts(self) -> set[str]:
        """The hosts that are not excluded."""
        return set(self._order)

    @property
    def host_assignment_order(self) -> list[str]:
        """The hosts that are not excluded, the oldest first."""
        return self._order

    def get_slots(self, host: str) -> int:
        """Returns the slots of a host; 0 for an unknown one."""
        return self._host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """Returns the slots of all hosts that are not excluded."""
        return sum(self.get_slots(host) for host in self._order)

    def update(self, hosts_state: Mapping[str, HostState]) -> DiscoveredHosts:
        """Removes hosts that were excluded meanwhile from the order. Returns itself."""
        self._order = [host for host in self._order if not hosts_state[host].is_blacklisted()]
        return self


class HostManager:
    """The hosts of a job: finds them, keeps their order, excludes them.

    discovery      -- finds the hosts
    cooldown_range -- as for `HostState`
    """

    def __init__(self, discovery: HostDiscovery, cooldown_range: Sequence[float] | None = None) -> None:
        if cooldown_range is not None:
            HostState._validate_cooldown_range(cooldown_range)
        self._discovery = discovery
        self._hosts_state: dict[str, HostState] = defaultdict(lambda: HostState(cooldown_range))
        self._current_hosts = DiscoveredHosts({}, [])

    def update_available_hosts(self) -> int:
        """Finds the hosts again. Returns how they changed, of `HostUpdateResult`.

        A host whose cooldown is over counts as added. Raises what the discovery does.
        """
        before = self._current_hosts
        found = dict(self._discovery.find_available_hosts_and_slots())
        returned = [host for host in found if self._hosts_state[host].is_resurrected()]
        for host in returned:
            self._hosts_state[host].whitelist()
        if found == before.host_slots and not returned:
            return HostUpdateResult.no_update
        available = [host for host in found if not self._hosts_state[host].is_blacklisted()]
        order = self.order_available_hosts(available, before.host_assignment_order)
        self._current_hosts = DiscoveredHosts(found, order)
        return _change(before.host_slots, found) | (HostUpdateResult.added if returned else HostUpdateResult.no_update)

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """The hosts of the last `update_available_hosts`, without those excluded since."""
        return self._current_hosts.update(self._hosts_state)

    def blacklist(self, host: str) -> None:
        """Excludes a host, because a process failed there."""
        if not self._hosts_state[host].is_blacklisted():
            _log.info("host %s is excluded, because a process failed there", host)
        self._hosts_state[host].blacklist()

    def is_blacklisted(self, host: str) -> bool:
        """Returns whether a host is excluded."""
        return self._hosts_state[host].is_blacklisted()

    def get_host_event(self, host: str) -> threading.Event:
        """Returns the event that is set when a host is excluded."""
        return self._hosts_state[host].get_event()

    @staticmethod
    def order_available_hosts(available_hosts: Iterable[str], prev_host_assignment_order: Sequence[str]) -> list[str]:
        """Returns the hosts in the order of assignment: those of the previous order first, in that order."""
        available = list(available_hosts)
        kept = [host for host in prev_host_assignment_order if host in available]
        return kept + [host for host in available if host not in kept]


def _change(before: Mapping[str, int], now: Mapping[str, int]) -> int:
    """Returns how slots changed, of `HostUpdateResult`."""
    hosts = {*before, *now}
    is_removed = any(now.get(host, 0) < before.get(host, 0) or host not in now for host in hosts)
    is_added = any(now.get(host, 0) > before.get(host, 0) or host not in before for host in hosts)
    removed = HostUpdateResult.removed if is_removed else HostUpdateResult.no_update
    return removed | (HostUpdateResult.added if is_added else HostUpdateResult.no_update)


class HostDiscovery:
    """Finds the hosts of a job. A subclass implements how."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the number of slots of each host."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Finds hosts with a command, which prints a line `host:slots` for each, or `host`.

    discovery_script -- the command, for a shell
    default_slots    -- the slots of hosts that are printed without a number
    """

    def __init__(self, discovery_script: str, default_slots: int | None = None) -> None:
        self._discovery_script = discovery_script
        self._default_slots = default_slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Runs the command, for 60 s at most.

        Raises RuntimeError if it fails, takes longer, prints another kind of line, or two numbers of slots for one
        host; ValueError for a host without a number if there is no default.
        """
        output, errors = io.StringIO(), io.StringIO()
        timeout_s = constants.current("DISCOVERY_SCRIPT_TIMEOUT_SECS", {})
        is_over = threading.Event()
        timer = threading.Timer(timeout_s, is_over.set)
        timer.daemon = True
        timer.start()
        try:
            status = safe_shell_exec.execute(self._discovery_script, stdout=output, stderr=errors, events=[is_over])
        finally:
            timer.cancel()
        if is_over.is_set():
            raise RuntimeError(
                f"the discovery script {self._discovery_script} took longer than {timeout_s} s; it should print the "
                "hosts and end"
            )
        if status != 0:
            last = errors.getvalue().strip().rpartition("\n")[2]
            raise RuntimeError(
                f"Failed to execute discovery script: {self._discovery_script}. Exit code: {status}. {last}".rstrip()
            )
        return self._parsed(output.getvalue())

    def _parsed(self, output: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for line in filter(None, map(str.strip, output.splitlines())):
            match = _LINE.fullmatch(line)
            if match is None:
                raise RuntimeError(
                    f"the discovery script {self._discovery_script} printed {line[:200]!r}, which is not `host:slots`, "
                    "for example alpha:4"
                )
            slots = self._default_slots if match["slots"] is None else int(match["slots"])
            if slots is None:
                raise ValueError(
                    f"the discovery script {self._discovery_script} printed {line!r} without slots; print "
                    f"{line}:<slots>, or give --slots-per-host"
                )
            if found.setdefault(match["host"], slots) != slots:
                raise RuntimeError(
                    f"the discovery script {self._discovery_script} printed host {match['host']} twice, with "
                    f"{found[match['host']]} and {slots} slots; print each host once"
                )
        return found


class FixedHosts(HostDiscovery):
    """Hosts that a program sets.

    host_slots -- the number of slots of each host
    """

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the hosts that were set last."""
        return dict(self._host_slots)

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Replaces the hosts."""
        self._host_slots = dict(host_slots)


__all__ = [
    "DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS",
    "DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS",
    "DiscoveredHosts",
    "FixedHosts",
    "HostDiscovery",
    "HostDiscoveryScript",
    "HostManager",
    "HostState",
]
