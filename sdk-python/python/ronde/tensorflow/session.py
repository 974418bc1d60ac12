"""The session of `hvd.init`, for operations of graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde import _ronde
from ronde.frameworks import basics, process_sets, world
from ronde.tensorflow import xla

if TYPE_CHECKING:
    from collections.abc import Sequence


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None, **settings: Any) -> None:
    """Connects this process to its sidecar. Does nothing if it is connected already.

    As `ronde.torch.init`, and the session is the same: a process has one. Raises ValueError for
    `on_failure="continue"`, which this module does not support.
    """
    basics.init_without_replay(comm, process_sets, settings, xla.NO_REPLAY)


def _follow() -> None:
    """Gives the operations the session of the process, and what they answer about it."""
    if not world.is_begun():
        _ronde.detach_tensorflow()
        xla.follow()
        return
    current = world.current()
    if current.client.replay is not None:
        # A session of ronde.torch, which may be replaced while operations are in flight.
        _ronde.detach_tensorflow()
        xla.follow()
        return
    numbers = (current.rank, current.size, current.local_rank, current.local_size)
    sets = {}
    if current.base is not None and current.base.id is not None:
        # The ranks that `init` was given, if not all: what operations know as the global process set.
        sets[current.base.id] = (current.size, True)
    for each in process_sets.registered():
        if each.process_set_id is not None and each.ranks is not None:
            sets[each.process_set_id] = (len(each.ranks), current.rank in each.ranks)
    _ronde.attach_tensorflow(current.client.native_session, numbers, sets)
    xla.follow()


def follow() -> None:
    """Makes operations use the process's session from now on."""
    world.on_change(_follow)
