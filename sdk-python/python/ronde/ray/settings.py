"""The settings of executors, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar


@dataclass
class MiniSettings:
    """How long an executor waits, and by what the sidecars of several nodes authenticate each other.

    timeout_s                 -- for workers to answer, and for sidecars to reach each other
    placement_group_timeout_s -- for Ray to find places for the workers, and then to start them
    nics                      -- the networks that sidecars listen on, such as "eth0,10.0.0.0/8"; default: all
    ssh_identity_file, ssh_str -- unused: Ray starts the workers, and nothing uses ssh
    verbose                   -- unused
    job_secret_file           -- the path of a file with the same secret on all nodes (`ronde certs secret`)
    certs                     -- the path, on each node, of the directory with its certificate (`ronde certs once`)
    discovery                 -- finds the nodes of an elastic job, with a method `find_available_hosts_and_slots` that
                                 returns the slots of each node, by its address or another name of it
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    nics: str | list[str] | set[str] | tuple[str, ...] | None = None
    ssh_identity_file: str | None = None
    ssh_str: str | None = None
    verbose: int = 0
    job_secret_file: str | None = None
    certs: str | None = None
    discovery: Any = None

    @property
    def start_timeout(self) -> float:
        """The same as `timeout_s`."""
        return self.timeout_s

    def interfaces(self) -> str:
        """Returns `nics` as `--network-interfaces` takes them."""
        if self.nics is None or isinstance(self.nics, str):
            return self.nics or ""
        return ",".join(sorted(self.nics))


def discovery_of(settings: MiniSettings, override_discovery: bool) -> Any:
    """Returns what finds the nodes of an elastic job; None for Ray's table of nodes.

    Raises ValueError if the table is not wanted and the settings have nothing else.
    """
    if override_discovery:
        return None
    if settings.discovery is None:
        # Without it the job would use all nodes, which the caller has excluded.
        raise ValueError(
            "override_discovery is False, but the settings have no discovery; give create_settings(discovery=...) an "
            "object with the method find_available_hosts_and_slots, or leave override_discovery out for all nodes"
        )
    return settings.discovery


_Settings = TypeVar("_Settings", bound=MiniSettings)


def adopted(given: Any, kind: type[_Settings]) -> _Settings:
    """Returns settings of this kind: the given ones, or what another object, such as Horovod's `Settings`, has of them.

    given -- None for the defaults; what it lacks, or has as None, has the default, too
    """
    if isinstance(given, kind):
        return given
    names = [field.name for field in fields(kind)]
    found = {name: value for name in names if (value := getattr(given, name, None)) is not None}
    start = getattr(given, "start_timeout", None)
    if given is not None and start is None and not found:
        raise TypeError(f"settings is of type {type(given).__name__}; make them by RayExecutor.create_settings(...)")
    if start is not None and "timeout_s" not in found:
        found["timeout_s"] = float(getattr(start, "timeout", start))
    return kind(**found)
