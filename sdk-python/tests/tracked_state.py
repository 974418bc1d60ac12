"""A state that records its calls, for tests without a job."""

from __future__ import annotations

import copy
from typing import Any

from ronde.elastic import ObjectState


class Tracked(ObjectState):
    """A state of a world of one rank."""

    def __init__(self, **values: Any) -> None:
        self.log: list[str] = []
        super().__init__(copy.deepcopy, lambda: 0, **values)

    def save(self) -> None:
        self.log.append("save")
        super().save()

    def restore(self) -> None:
        self.log.append("restore")
        super().restore()

    def sync(self) -> None:
        self.log.append("sync")
        super().sync()

    def reset(self) -> None:
        self.log.append("reset")
