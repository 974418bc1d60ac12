"""A process group for torchft, whose Manager gives it new members whenever replica groups fail or join.

    from ronde.torch.torchft import ProcessGroupRonde
    manager = torchft.Manager(pg=ProcessGroupRonde(timeout=timedelta(seconds=30)), ...)

Each quorum has its own session, over encrypted links between hosts that `ronde.reconfigure` describes. torchft's
lighthouse, managers and stores pass handles on, which contain no secret. They are torchft's own servers and do not
encrypt; ronde does not trust them. So send checkpoints by torchft's PGTransport over a group like this one: its
HTTPTransport sends pickles of the weights unencrypted.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceOp
from torchft.process_group import ProcessGroupWrapper, create_store_client

from ronde.errors import PeerLostError, RefusedError, RondeError, ShutDownError, TimedOutError
from ronde.torch.distributed.reconfigurable import ReconfigurableGroup
from ronde.torch.distributed.work import Operation, Together

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

__all__ = ["ProcessGroupRonde"]

_TIMEOUT = datetime.timedelta(seconds=60)
_NO_TIMEOUT = datetime.timedelta(0)
_UUID_BITS = 62
_LINGER_S = 0.5
_Options = TypeVar("_Options")


class _Given(NamedTuple):
    """What `reconfigure` takes; PyTorch has a class for it since 2.14."""

    uuid: int
    handles: list[str]
    timeout: datetime.timedelta


class ProcessGroupRonde(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group of torchft over ronde, for tensors of CPUs, and of GPUs through host memory.

    timeout -- after which an operation fails, and within which the members of a quorum have to come

    It works with Managers that call `configure` (torchft 0.2) and with those that call `reconfigure`. On several hosts
    set RONDE_SIDECAR_JOB_SECRET_FILE before it is made (docs/PYTORCH.md). A process may have several.

    Errors keep ronde's classes (`ronde.PeerLostError`, `ronde.TimedOutError`, ...), and begin with the words that
    torchft knows: "Connection closed by peer" and "Timed out waiting".
    """

    def __init__(self, timeout: datetime.timedelta = _TIMEOUT) -> None:
        super().__init__(timeout)
        self._group = ReconfigurableGroup(0, 1, "torchft", timeout, reuses_uuids=True)
        self._abortion: Exception | None = None

    def getBackendName(self) -> str:  # noqa: N802
        """Returns `torchft-ronde`."""
        return "torchft-ronde"

    # === Members ===

    def _handle_id(self) -> str:
        return self._group.handle.id

    def get_reconfigure_handle(self) -> str:
        """Returns the text by which other members know this group; the same for its life.

        It has the fields that torchft's wrappers of process groups read, and names no store: there is none.
        """
        return self._group.handle.encode(store="ronde", global_rank=getattr(self, "_global_rank", None))

    def reconfigure(self, opts: Any) -> Together:
        """Begins a session of the members whose handles are given, in their order. All of them call this.

        opts -- PyTorch's or torchft's ReconfigureOptions

        Returns work that is complete. Raises what `ronde.torch.distributed.reconfigurable.ReconfigurableGroup` does: a
        TimedOutError names the members that have not come.
        """
        self._rank, self._uuid = None, opts.uuid
        self._pg, self._abortion = None, None
        with self._run_context():
            work = self._group.reconfigure(opts)
        self._pg, self._rank = self._group, self._group.rank()
        return work

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Exchanges handles through a store, and begins a session of those that have given theirs.

        store_addr       -- HOST:PORT/PREFIX of a TCPStore; a prefix that was not used before
        replica_id       -- the name of the replica group, for torchft's log
        rank, world_size -- of this process among the members
        quorum_id, group_rank, group_world_size, global_ranks -- for torchft's log

        Raises RondeError if the store fails, and what `reconfigure` does.
        """
        self._replica_id, self._quorum_id = replica_id, quorum_id
        self._group_rank, self._group_world_size, self._global_ranks = group_rank, group_world_size, global_ranks
        # The former session ends also where the exchange fails: its members have gone on without this process.
        self.abort(errored=False)
        keys = ["ronde/uuid", *(f"ronde/handle/{member}" for member in range(world_size))]
        try:
            store = create_store_client(store_addr, self._timeout)
            store.set(keys[1 + rank], self.get_reconfigure_handle())
            if rank == 0:
                store.set(keys[0], str(secrets.randbits(_UUID_BITS)))
            uuid, *handles = _values(store, keys, self._timeout)
        except Exception as error:
            raise RondeError(
                f"the store {store_addr} by which rank {rank} exchanges handles failed: {error}"
            ) from error
        self.reconfigure(_Given(_number(uuid), [handle.decode(errors="replace") for handle in handles], self._timeout))

    # === Errors ===

    def abort(self, errored: bool = True) -> None:
        """Leaves the session: operations in flight fail on all members. May be called from any thread.

        errored -- whether `errored` returns an error from now on, and torchft logs one
        """
        if errored:
            self._abortion = RuntimeError("the process group was aborted")
        super().abort(errored)
        self._group.abort()

    def shutdown(self) -> None:
        """Leaves the session, which ends for all members.

        Gives them a moment in which operations that are under way succeed, unless they leave sooner.
        """
        super().shutdown()
        self._group.shutdown(_LINGER_S)

    def errored(self) -> Exception | None:
        """Returns why the group has to be reconfigured: it was aborted, or an operation has failed; else None."""
        if self._abortion is not None or (failure := self._group.errored()) is None:
            return self._abortion
        cause = getattr(failure, "cause", "operation")
        return RondeError(f"operations of the process group are aborted until it is reconfigured: {failure}", cause)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of later operations and quorums."""
        super().set_timeout(timeout)
        self._timeout = timeout
        self._group.set_timeout(timeout)

    @contextlib.contextmanager
    def _run_context(self) -> Iterator[None]:
        try:
            yield
        except RondeError as error:
            raise _in_words_of_torchft(error) from error

    # === Calls ===

    def _opts_hook(self, opts: _Options) -> _Options:
        """Returns options, even where torchft passes a reduction alone."""
        if not isinstance(opts, (ReduceOp, ReduceOp.RedOpType)):
            return opts
        options: Any = AllreduceOptions()
        options.reduceOp = opts
        return options  # type: ignore[no-any-return]

    def _wrap_work(self, work: Any, opts: object) -> Work:
        del opts
        return _TorchftWork(work)


class _TorchftWork(Work):
    """An operation whose errors begin with the words that torchft knows."""

    def __init__(self, work: Operation | Together) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Waits for the result. Raises its error."""
        try:
            return self._work.wait(timeout)
        except RondeError as error:
            raise _in_words_of_torchft(error) from error

    def synchronize(self) -> None:
        """Calls `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether its results are written or it has failed."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Returns whether it is complete and has not failed."""
        return self._work.is_success()

    def exception(self) -> Exception | None:
        """Returns its error; None while it is in flight and if it has not failed."""
        error = self._work.exception()
        return _in_words_of_torchft(error) if isinstance(error, RondeError) else error

    def result(self) -> list[torch.Tensor]:
        """Waits for the results and returns them. Raises what `wait` does."""
        self.wait()
        return self._work.result()

    def get_future(self) -> Any:
        """Returns a future of the results."""

        def value(done: Any) -> Any:
            try:
                return done.value()
            except RondeError as error:
                raise _in_words_of_torchft(error) from error

        return self._work.get_future().then(value)


def _in_words_of_torchft(error: RondeError) -> RondeError:
    """Returns the same error with a text by which torchft's users find it."""
    text, words = str(error), ""
    if isinstance(error, (PeerLostError, ShutDownError)):
        words = "Connection closed by peer"
    elif isinstance(error, TimedOutError) or (isinstance(error, RefusedError) and "was withdrawn" in text):
        # The other member has given the operation up, for its own timeout.
        words = "Timed out waiting"
    if words and words not in text:
        text = f"{words}: {text}"
    return type(error)(text, error.cause, error.rank, error.sidecar, error.tensor, error.blame, error.record)


def _values(store: Store, keys: list[str], timeout: datetime.timedelta) -> list[bytes]:
    store.wait(keys, timeout)
    return [store.get(key) for key in keys]


def _number(text: bytes) -> int:
    """Parses what rank 0 has written. Raises RondeError if it is no number."""
    if not text.isdigit() or len(text) > 20:
        raise RondeError(
            f"the store has {text[:32]!r} as the number of a session; install one release of ronde", "protocol"
        )
    return int(text)
