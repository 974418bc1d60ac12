"""The session of this process for JAX: `init`, `shutdown`, ranks and process sets."""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

import jax

from ronde import _ronde, without_launcher
from ronde.client import connect
from ronde.elastic import membership
from ronde.elastic.notification import notification_manager
from ronde.frameworks import basics
from ronde.jax import internals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ronde.client import Client
    from ronde.errors import RondeError
    from ronde.jax.request import Request
    from ronde.process_set import ProcessSet


class _State:
    """The state of the process."""

    client: Client | None = None
    is_own: bool = False  # whether `init` has connected it
    has_bound: bool = False  # whether there may be programs of an earlier session
    settings: dict[str, Any] | None = None  # of the last `init` that has connected


_state = _State()


def init(client: Client | None = None, **settings: Any) -> None:
    """Connects this process to its sidecar. Does nothing if it is connected already.

    client   -- a session to use. Default: that of `ronde.torch` or `ronde.tensorflow` in this process if there is one,
                else a new one: the sidecar accepts each rank once. `shutdown` closes only a new one. After the other
                framework, or the program, has ended its session, the next call takes another one.
    settings -- arguments of `ronde.connect`; the default of `on_failure` is that of RONDE_ON_FAILURE

    Ranks are those of the launcher: `ronde run`, or another one on this host, for which rank 0 starts the sidecar. A
    process without a launcher is a job of one rank. In an elastic job this waits for a membership with this worker. A
    second session drops JAX's compiled programs, because they depend on ranks, their number and process sets.

    Raises what `ronde.connect` does, and ValueError if a client and settings are given.
    """
    if _has_lost_client():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # raised where the program uses its results
            shutdown()
    if _state.client is not None:
        return
    if client is not None and settings:
        raise ValueError(f"init was given a client and settings for another one: {', '.join(settings)}")
    client = client or _client_of_other_frameworks()
    found = _connected(settings) if client is None else client
    try:
        bind(found)
    except BaseException:
        if client is None:
            found.close()
        raise
    _state.client, _state.is_own = found, client is None
    if client is None:
        _state.settings = dict(settings)
        notification_manager.follow(found.membership_change if membership.is_elastic() else None)


def _has_lost_client() -> bool:
    """Whether the session is one of another framework or of the program, which has ended it."""
    client = _state.client
    if client is None or _state.is_own or client.is_open:
        return False
    # After a failure, the framework's client is not open either, until the framework restarts its session.
    return client is not _client_of_other_frameworks()


def _connected(settings: dict[str, Any]) -> Client:
    """Returns a new session, whose states learn of each membership that it enters by itself."""
    options = {**without_launcher.settings_without_launcher(settings), **settings}
    if (on_failure := basics.default_on_failure()) is not None:
        options.setdefault("on_failure", on_failure)
    client: Client = membership.connected(lambda: connect(**options))
    client.on_membership(notification_manager.note_replay)
    return client


def _client_of_other_frameworks() -> Client | None:
    """Returns the client of `ronde.torch` or `ronde.tensorflow`, if one of them has a session."""
    world = sys.modules.get("ronde.frameworks.world")
    if world is None or not world.is_begun():
        return None
    found: Client = world.current().client
    return found


def bind(client: Client) -> None:
    """Makes compiled programs use this client's session, and that of each membership which it enters."""
    _ronde.xla_bind(client.native_session)
    # Weakly: the client keeps what it calls, and a session that has ended leaves with its client.
    bound = weakref.ref(client)
    client.on_membership(lambda: _bind_again(bound()))
    _drop_programs()


def _bind_again(client: Client | None) -> None:
    if client is not None and _state.client is client:
        _ronde.xla_bind(client.native_session)
        _drop_programs()


def _drop_programs() -> None:
    """Drops the compiled programs of an earlier session: this rank, the number of ranks and sets are parts of them."""
    if _state.has_bound:
        jax.clear_caches()
    _state.has_bound = True


def shutdown() -> None:
    """Ends the session for all ranks, after the programs in flight. Runs automatically when the program ends.

    Does nothing without a session. A client that another framework or the program has made stays open. `init` may be
    called again. Raises the failure of a program in flight.
    """
    ended, _state.client = _state.client, None
    if ended is None:
        return
    # The program has received the failure with the results.
    internals.clear_failures()
    try:
        jax.effects_barrier()
    finally:
        if _state.is_own:
            notification_manager.follow(None)
            ended.close()


def init_again() -> None:
    """Restarts the session after a failure, also one of `ronde.torch` or `ronde.tensorflow` that this module uses.

    Raises what `init` does, and ValueError if the program has made the session's client.
    """
    is_own = _state.is_own
    # The failure of a program in flight is the one that this restart answers, or another rank's.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        shutdown()
    if is_own:
        init(**(_state.settings or {}))
    elif _client_of_other_frameworks() is not None:
        basics.init_again()
        init()
    else:
        raise ValueError("the session cannot restart, because init was given its client; call init() without one")


def share() -> None:
    """Makes this module use the session of `ronde.frameworks`, which Keras on JAX begins, from now on."""
    from ronde.frameworks import world

    world.on_change(_follow)


def _follow() -> None:
    client = _client_of_other_frameworks()
    if client is _state.client:
        return
    if client is None:
        if not _state.is_own:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # raised where the program uses its results
                shutdown()
    else:
        bind(client)
        _state.client, _state.is_own = client, False


def is_initialized() -> bool:
    """Returns whether `init` has been called, and `shutdown` has not been called since."""
    return _state.client is not None


def client() -> Client:
    """Returns the process's client, ronde's native interface. Raises ValueError before `init`."""
    if _state.client is None:
        raise ValueError("ronde.jax has not been initialized; call ronde.jax.init() first")
    return _state.client


def set_of(request: Request) -> ProcessSet | None:
    """Returns the process set of a request, which an earlier session may have made; None for all ranks.

    Raises ValueError before `init`, and if the set has been removed or has other ranks now.
    """
    found = client()._sets.get(request.set)
    ranks = [] if found is None else found.ranks
    rank = request.ranks[request.place]
    if tuple(ranks) != request.ranks or rank != client().rank:
        raise ValueError(
            f"{request.kind} was traced as rank {rank} of the process set {list(request.ranks)}, and the set has "
            "been removed, or the ranks have changed since. Trace the function again"
        )
    return found if request.set else None


def rank() -> int:
    """This process's number, from 0. Raises ValueError before `init`, as the following functions do."""
    return client().rank


def size() -> int:
    """The number of processes."""
    return client().size


def max_size() -> int:
    """The largest number of processes that an elastic job may have (`--max-np`); in other jobs, and without a limit,
    the number of processes.
    """
    given = membership.max_size()
    return size() if given is None else given


def local_rank() -> int:
    """This process's number among those of the same sidecar."""
    return client().local_rank


def local_size() -> int:
    """The number of processes of the same sidecar."""
    return client().local_size


def cross_rank() -> int:
    """The number of this process's sidecar among those that have a process of this local rank."""
    return client().cross_rank


def cross_size() -> int:
    """The number of sidecars that have a process of this local rank."""
    return client().cross_size


def is_homogeneous() -> bool:
    """Whether all sidecars serve the same number of processes."""
    return client().is_homogeneous


def add_process_set(ranks: Iterable[int]) -> ProcessSet:
    """Adds a process set of these ranks. All ranks call it, with the same ranks. Not in a compiled program."""
    return client().add_process_set(list(ranks))


def remove_process_set(process_set: ProcessSet) -> None:
    """Removes a process set. All ranks call it. Not in a compiled program.

    Programs that were compiled with the set fail from then on.
    """
    client().remove_process_set(process_set)


def failure_of(error: BaseException) -> RondeError | ValueError | None:
    """Returns the exception of ronde for an error that JAX has raised; None if ronde has not caused it.

    A compiled program raises `jax.errors.JaxRuntimeError` with the text of ronde's exception. This is that exception,
    such as `ronde.MismatchError` or `ronde.PeerLostError`, with its cause, rank and record. The last 16 failures are
    known.
    """
    found: RondeError | ValueError | None = _ronde.xla_failure(str(error))
    return found
