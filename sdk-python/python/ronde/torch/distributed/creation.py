"""Creation of groups: what PyTorch calls, and the session that the first group begins."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed

import ronde.frameworks.basics
import ronde_entry_points
from ronde import without_launcher
from ronde.torch.distributed import env_rendezvous
from ronde.torch.distributed.group import CAN_EXTEND_BACKEND, group_of
from ronde.torch.distributed.groups import Groups, shut_down_all
from ronde.torch.distributed.reconfigurable import ReconfigurableGroup
from ronde.torch.distributed.returned import return_operations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

    from ronde.client import Client
    from ronde.torch.distributed.group import Group


_NO_REPLAY = (
    'on_failure="continue" is for operations of ronde.torch: ranks and groups of torch.distributed have fixed sizes. '
    "Leave it out, and RONDE_ON_FAILURE, too; hvd.elastic.run restores the last commit instead"
)
_GIVE_THESE = "give init_process_group these, or leave ranks and sizes to init_method='ronde://'"
_ALONE = (
    ". A process that no launcher has started is a job of one rank: start the ranks with `ronde run -np N`, or make "
    "the default group by init_process_group('ronde') before other calls of ronde: the ranks meet by PyTorch's means"
)


class _State:
    """The groups of this process."""

    groups: Groups | None = None
    process = 0  # which made them; a fork of it leaves them alone


_state = _State()


def groups() -> Groups | None:
    """Returns the groups of the session of the default group, or of the latest session; None before the first one."""
    default = _default_group()
    return _state.groups if default is None else default.groups


def _default_group() -> Group | None:
    """Returns the default group of torch.distributed if it is of ronde."""
    whole = torch.distributed.GroupMember.WORLD
    return None if whole is None else group_of(whole)


def begun(settings: dict[str, Any]) -> Groups:
    """Returns the groups of this process, after calling `ronde.torch.init` if necessary.

    Raises what that raises, and ValueError for a session with `on_failure="continue"`, or if it is to begin.
    """
    is_ours = not ronde.frameworks.basics.is_initialized()
    if is_ours:
        rest = dict(settings)
        comm, sets = rest.pop("comm", None), rest.pop("process_sets", None)
        ronde.frameworks.basics.init_without_replay(comm, sets, rest, _NO_REPLAY)
    else:
        ronde.frameworks.basics.init(**settings)
    client = ronde.frameworks.basics.client()
    if client.replay is not None:
        raise ValueError(_NO_REPLAY)
    if _state.groups is None or _state.groups.client is not client:
        end = ronde.frameworks.basics.shutdown if is_ours else None
        _state.groups, _state.process = Groups(client, end), os.getpid()
        _watch_end_of_program()
    return _state.groups


def _watch_end_of_program() -> None:
    # After `init`, whose handler ends the session without waiting for other ranks: the last one runs first.
    atexit.unregister(_end_of_program)
    atexit.register(_end_of_program)


def _end_of_program() -> None:
    """Shuts groups down that the program did not destroy: the first rank that leaves ends the session for all.

    An exception that ends the program is left to the session's own handler, which reports it to the others at once.
    """
    is_failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    if _state.process == os.getpid() and not is_failed:
        shut_down_all()


def create(options: Any, backend_options: Any) -> Any:
    """Creates a group of the backend; `torch.distributed` calls it.

    Raises ValueError if PyTorch has another rank or size than the job, and what `begun` does.
    """
    del backend_options
    if CAN_EXTEND_BACKEND:
        return_operations()
    order = list(options.global_ranks_in_group)
    if not order:
        return _create_default(options)
    default = _default_group()
    if default is None:  # it is of another backend
        found = begun({})
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        check_agrees("the default group of torch.distributed has", rank, size, found.client, _GIVE_THESE)
        made = found.make(order, options.group_id, options.timeout)
    else:
        # PyTorch numbers ranks within the default group, which after `shrink_group` are not those of the job.
        made = default.groups.make(default.in_job(order), options.group_id, options.timeout)
    assert made is not None, "PyTorch makes groups on their members only"
    return made


def _create_default(options: Any) -> Any:
    if getattr(options, "enable_reconfigure", False):
        _state.process = os.getpid()
        _watch_end_of_program()
        return ReconfigurableGroup(options.group_rank, options.group_size, options.group_id, options.timeout)
    found = begun(_settings(options))
    check_agrees("torch.distributed was given", options.group_rank, options.group_size, found.client, _GIVE_THESE)
    found.exchange_handles()
    made = found.make(range(found.client.size), options.group_id, options.timeout)
    assert made is not None, "all ranks are members"
    return made


def _settings(options: Any) -> dict[str, Any]:
    """Returns settings for the session of the group of all ranks: where no launcher of ronde is, by PyTorch's means."""
    if ronde.frameworks.basics.is_initialized() or ronde_entry_points.is_in_job(os.environ):
        return {}
    # PyTorch's timeout is also that of the rendezvous, unless the user has set one for this alone.
    timeout = None if "RONDE_START_TIMEOUT" in os.environ else options.timeout.total_seconds()
    return without_launcher.settings_for_ranks(options.group_rank, options.group_size, options.store, timeout)


def check_agrees(what: str, rank: int, size: int, client: Client, instead: str) -> None:
    """Raises ValueError if a group has another rank or size than the job.

    what    -- the beginning of the error: which group has them
    instead -- what to do
    """
    if (rank, size) == (client.rank, client.size):
        return
    differs = [
        f"{name} {given}, but {job} in the job of ronde"
        for name, given, job in [("rank", rank, client.rank), ("world size", size, client.size)]
        if given != job
    ]
    raise ValueError(
        f"{what} {' and '.join(differs)}; this process is rank {client.rank} of {client.size} ranks: "
        f"{instead}{_ALONE if client.size == 1 else ''}"
    )


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
    """Handles `ronde://`: rank and size are the job's. A store is opened if a group of another backend needs it."""
    del url
    client = begun({}).client
    yield env_rendezvous.store(client.rank, client.size, **options), client.rank, client.size


def register() -> None:
    """Registers the backend and its ways to meet. Called once, by the import of the package."""
    ronde_entry_points.replace_rendezvous(_rendezvous)
    ronde_entry_points.register_creator(create)
