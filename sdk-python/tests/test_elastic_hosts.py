"""The hosts of Horovod's elastic driver: changes, exclusion, discovery by a script."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Callable
from unittest import mock

import pytest
from elastic_drivers import Found

from horovod.runner.elastic import constants, discovery
from horovod.runner.elastic.discovery import DiscoveredHosts, FixedHosts, HostDiscoveryScript, HostManager, HostState
from horovod.runner.elastic.worker import HostUpdateResult

if TYPE_CHECKING:
    import pathlib


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
