"""The session of `hvd.init` for Keras on PyTorch and JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.frameworks import basics

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_REPLAY = (
    'on_failure="continue" is for the loops of ronde.torch: `fit` would go on with the shares and steps of the ranks '
    "before the loss. Leave it out, and RONDE_ON_FAILURE, too; hvd.elastic.run restores the last commit instead"
)


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None, **settings: Any) -> None:
    """Connects this process to its sidecar. Does nothing if it is connected already.

    As `ronde.torch.init`, and the session is the same: a process has one. Raises ValueError for
    `on_failure="continue"`, which `fit` does not support.
    """
    basics.init_without_replay(comm, process_sets, settings, NO_REPLAY)
