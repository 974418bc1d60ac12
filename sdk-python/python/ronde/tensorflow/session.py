"""The session of `hvd.init`, for operations of graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde import _ronde
from ronde.elastic.membership import is_elastic
from ronde.frameworks import basics, process_sets, world
from ronde.replay import CONTINUE, RAISE
from ronde.tensorflow import xla

if TYPE_CHECKING:
    from collections.abc import Sequence


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None, **settings: Any) -> None:
    """Connects this process to its sidecar. Does nothing if it is connected already.

    As `ronde.torch.init`, and the session is the same: a process has one. Raises ValueError for
    `on_failure="continue"`, which this module does not support.
    """
    on_failure = settings.get("on_failure", basics.default_on_failure())
    if on_failure == CONTINUE and is_elastic():
        raise ValueError(xla.NO_REPLAY)
    basics.init(comm, process_sets, **{**settings, "on_failure": on_failure or RAISE})


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
    for each in process_sets.registered():
        if each.process_set_id is not None and each.ranks is not None:
            sets[each.process_set_id] = (len(each.ranks), current.rank in each.ranks)
    _ronde.attach_tensorflow(current.client.native_session, numbers, sets)
    xla.follow()


def follow() -> None:
    """Makes operations use the process's session from now on."""
    world.on_change(_follow)
