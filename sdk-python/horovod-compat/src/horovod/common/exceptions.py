"""What collectives and elastic jobs raise."""

from __future__ import annotations

from ronde.elastic import HostsUpdatedInterrupt
from ronde.errors import RondeError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """A framework's release is not the one that a native library was built for. Nothing here is: never raised.

    name              -- the framework
    version           -- the release that the library was built for
    installed_version -- the release that is installed
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built for {name} {version}, but {installed_version} is installed", name=name)
        self.version = version
        self.installed_version = installed_version
