"""Makes the gradients of a step share one commit, with a client that replays interrupted operations.

So the cost of a step without faults is one small barrier, whatever the number of gradients.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ronde.client import Client
    from ronde.replay import Commit, Replay


class StepCommit:
    """The commit of the gradients that were submitted since the last step."""

    def __init__(self) -> None:
        self._replay: Replay | None = None
        self._commit: Commit | None = None

    def submitting(self, client: Client, name: str) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which operations of the client join the commit.

        name -- the name of the commit, the same on all ranks
        """
        replay = client.replay
        if replay is None:
            return _NOTHING
        if self._replay is not replay or self._commit is None:
            self._replay, self._commit = replay, replay.new_commit(name)
        return replay.joining(self._commit)

    @property
    def is_open(self) -> bool:
        """Whether operations have joined it."""
        return self._commit is not None

    def seal(self) -> None:
        """Ends it: its operations are ready when all of them are complete on all ranks."""
        commit, self._commit = self._commit, None
        if commit is not None and self._replay is not None:
            self._replay.seal(commit)


_NOTHING = contextlib.nullcontext()
