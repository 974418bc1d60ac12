"""The session of a strategy, and its end in good order."""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

import torch.distributed
from torch.distributed.constants import default_pg_timeout

import ronde.torch
from ronde.torch.distributed import env_rendezvous

if TYPE_CHECKING:
    import datetime

    from ronde.lightning.environment import RondeEnvironment

_BACKEND = "ronde"


def begin_group(job: RondeEnvironment, timeout: datetime.timedelta | None) -> None:
    """Makes the default process group, unless there is one.

    Raises RuntimeError if that has another backend, and RondeError if it has another rank or size than `job`.
    """
    if not torch.distributed.is_initialized():
        env_rendezvous.init_process_group(default_pg_timeout if timeout is None else timeout)
    elif not is_over_ronde():
        raise RuntimeError(
            f"the strategy needs the backend {_BACKEND!r}, but the default process group exists already, with "
            f"{torch.distributed.get_backend()!r}; do not call init_process_group before, or call it with {_BACKEND!r}"
        )
    job.check(torch.distributed.get_rank(), torch.distributed.get_world_size())


def is_over_ronde() -> bool:
    """Returns whether there is a default process group and ronde moves its tensors."""
    return torch.distributed.is_initialized() and _BACKEND in torch.distributed.get_backend_config()


def begin(job: RondeEnvironment) -> None:
    """Calls `ronde.torch.init`, unless that was done. Raises RondeError if the session has another rank or size."""
    ronde.torch.init()
    # Again, so that it runs before the handler that `init` has registered.
    atexit.unregister(_end)
    atexit.register(_end)
    job.check(ronde.torch.rank(), ronde.torch.size())


def _end() -> None:
    """Ends the session when all ranks have arrived here."""
    if ronde.torch.is_initialized() and getattr(sys, "last_value", None) is None:
        ronde.torch.barrier()
        ronde.torch.shutdown()
