"""Exceptions of collectives and elastic jobs."""

from __future__ import annotations

from ronde.elastic import HostsUpdatedInterrupt
from ronde.errors import RondeError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """A native library was built for another release of a framework. Never raised, as there is no such library here.

    name              -- the framework
    version           -- the release that the library was built for
    installed_version -- the release that is installed
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built for {name} {version}, but {installed_version} is installed", name=name)
        self.version = version
        self.installed_version = installed_version
