"""Elastic drivers of Horovod's API with injected workers and hosts, for tests."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable
from unittest import mock

from horovod.runner.elastic import constants, discovery
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

TIMEOUT_S = 20
Worker = Callable[[Any, Any], "tuple[int, float]"]
Make = Callable[..., ElasticDriver]


@contextlib.contextmanager
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes drivers that find hosts often, and stops them at the end."""
    monkeypatch.setattr(constants, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.02)
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


class Found(discovery.HostDiscovery):
    """Returns or raises one after the other; the last one again and again."""

    def __init__(self, *results: Any) -> None:
        self.results = list(results)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, Exception):
            raise result
        return dict(result)
