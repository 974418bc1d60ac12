"""The session with the sidecar, which is replaced when a rank is lost, and the operations that it replays."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import numpy

from ronde.elastic import membership
from ronde.errors import PeerLostError, RefusedError, RondeError, ShutDownError, TimedOutError
from ronde.ops import Sum
from ronde.replay.agreement import Report, Verdict, decide, decode, encode
from ronde.replay.held import Commit, Group, HeldOperation, Request, is_complete
from ronde.tensors import address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde import _ronde

RAISE, CONTINUE = "raise", "continue"
ON_FAILURE = (RAISE, CONTINUE)
"""What happens to operations in flight when a rank of an elastic job is lost."""

# Operations that the remaining ranks can perform again.
_KINDS = frozenset(("allreduce", "broadcast", "barrier"))
# The most names that operations may have; each needs some 150 bytes until the client is closed.
NAMES_MAX = 1 << 18
# The most losses in one recovery; each is a worker that has ended.
_LOSSES_MAX = 1_000
# How long a native operation may take to fail after its epoch has ended, in seconds; it fails at once.
_OUTCOME_TIMEOUT_S = 10.0
# How long a wait sleeps before it polls other operations in flight, in seconds.
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.001, 0.02
_WAIT_S = 1.0

_NO_REPORTS = (
    "ranks of the new membership have not reported their interrupted operations, see the warnings above for their "
    "numbers; give all workers of a job the same on_failure"
)
_ONE = numpy.ones(1, dtype=numpy.int32)

Returned = TypeVar("Returned")
_log = logging.getLogger("ronde.replay")


class Replay:
    """The session of a client, which continues when a rank is lost.

    open_session -- opens a session; waits until the epoch begins
    on_session   -- called with each further session, before interrupted operations are submitted in it
    refusal      -- returns why this rank cannot continue; empty if it can
    worker       -- the number of this worker

    All methods may be called in any thread.
    """

    def __init__(self, open_session: Callable[[], _ronde.Session], worker: int) -> None:
        self.on_session: Callable[[_ronde.Session], None] = lambda session: None
        self.refusal: Callable[[], str] = str
        self._open_session, self._worker = open_session, worker
        self._lock = threading.RLock()
        self._commits: dict[Commit, None] = {}  # those that are not done, in the order of their first operation
        self._names = _Names()
        self._joining = threading.local()
        self._workers: tuple[int, ...] = ()
        self._over: RondeError | None = None
        self._has_begun = False
        self.session, verdict = self._joined()
        self._enter(verdict)

    @property
    def can_continue(self) -> bool:
        """Whether operations can be submitted, perhaps after a recovery."""
        return self._over is None

    def close(self) -> None:
        """Forbids further recoveries, because the client is closed. Complete results can still be read."""
        with self._lock:
            self._over = self._over or ShutDownError("this client is closed", "closed")

    def restart_counting(self) -> None:
        """Restarts the numbers of operations, because ranks have made different ones until all of them joined."""
        with self._lock:
            self._names.restart()

    # === Submission ===

    @staticmethod
    def takes(kind: str, options: dict[str, Any]) -> bool:
        """Returns whether an operation is one that the remaining ranks can perform again."""
        is_plain = "plugin" not in options and not options.get("set") and not options.get("notify")
        return kind in _KINDS and is_plain

    def call(self, function: Callable[[_ronde.Session], Returned]) -> Returned:
        """Calls a function with the session, again if a rank is lost meanwhile. Raises what the function does."""
        with self._lock:
            for _ in range(_LOSSES_MAX):
                if self._over is not None:
                    raise self._over
                try:
                    return function(self.session)
                except PeerLostError as failure:
                    self._recover(failure)
            raise RondeError(f"{_LOSSES_MAX} workers were lost during one call", "rank_lost", blame="peer")

    def submit(
        self, kind: str, dtype: str | None, shape: Sequence[int], address: int, nbytes: int, options: dict[str, Any]
    ) -> HeldOperation:
        """Submits an operation as `_ronde.Session.submit` does, and raises what that raises."""
        return self._submit(kind, [(dtype, shape, address, nbytes)], options, is_group=False)[0]

    def submit_group(
        self, kind: str, tensors: Sequence[tuple[str, Sequence[int], int, int]], options: dict[str, Any]
    ) -> list[HeldOperation]:
        """Submits a group as `_ronde.Session.submit_group` does, and raises what that raises."""
        return self._submit(kind, tensors, options, is_group=True)

    def _submit(
        self, kind: str, tensors: Sequence[Any], options: dict[str, Any], is_group: bool
    ) -> list[HeldOperation]:
        options = {**options, "mapped": True}  # a result in the sidecar's memory would be lost with the session
        with self._lock:
            given = options.pop("name", None)
            name = self._names.resolve(kind, given, is_group)
            commit = self._joined_commit() or Commit(f"{kind}.{name}", is_sealed=True)
            is_named = given is not None or not commit.is_sealed
            self._names.check(commit, is_named)
            group = Group(name) if is_group else None
            operations = []
            for index, (dtype, shape, _, nbytes) in enumerate(tensors):
                request = Request(kind, dtype, shape, nbytes, name, options if index == 0 else dict(options))
                operations.append(HeldOperation(self, request, commit, group))
            if group is not None:
                group.members = operations

            def begin(session: _ronde.Session) -> None:
                if kind == "broadcast":
                    self._place_root(operations)
                for operation, (_, _, address, _) in zip(operations, tensors):
                    operation.request.stage(session, address)
                self._send(session, operations)

            self.call(begin)
            self._names.take(kind, given, is_group)
            for operation in operations:
                commit.add(operation)
            if commit not in self._commits:
                self._names.begin(commit, is_named)
                self._commits[commit] = None
            return operations

    def _place_root(self, operations: list[HeldOperation]) -> None:
        """Notes the worker that a broadcast comes from, whose rank may change."""
        for operation in operations:
            root = operation.request.options["root"]
            if root < len(self._workers):
                operation.request.root_worker = self._workers[root]

    def _send(self, session: _ronde.Session, operations: list[HeldOperation]) -> None:
        """Submits one operation, or all operations of a group."""
        first = operations[0].request
        if operations[0].group is None:
            rest = (first.kind, first.dtype, first.shape, first.address, first.nbytes)
            operations[0].native = session.submit(*rest, name=first.name, **first.options)
            return
        requests = [operation.request for operation in operations]
        parts = [(each.dtype or "", each.shape, each.address, each.nbytes) for each in requests]
        natives = session.submit_group(first.kind, parts, name=operations[0].group.name, **first.options)
        for operation, native in zip(operations, natives):
            operation.native = native

    # === Commits ===

    def new_commit(self, name: str) -> Commit:
        """Returns a commit for the operations that are submitted while `joining` it. Seal it after the last one."""
        return Commit(name, is_sealed=False)

    def joining(self, commit: Commit) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the operations that this thread submits belong to a commit."""
        return _Joining(self._joining, commit)

    def _joined_commit(self) -> Commit | None:
        commit: Commit | None = getattr(self._joining, "commit", None)
        return commit

    def seal(self, commit: Commit) -> None:
        """Ends a commit: no further operation joins it, and it is committed when all of them are complete."""
        with self._lock:
            commit.is_sealed = True
            self._next(commit)

    def advance(self, commit: Commit) -> None:
        """Does for a commit what can be done without waiting."""
        with self._lock:
            self._next(commit)

    def wait(self, operation: HeldOperation, timeout: float | None) -> bool:
        """Waits at most `timeout` seconds until an operation is ready. Returns whether it is.

        In a commit that is not sealed, an operation is ready as soon as it is complete on this rank.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = _PAUSE_MIN_S
        while True:
            with self._lock:
                native = self._next(operation.commit, operation)
                if native is not None and len(self._commits) > 1:
                    self._advance_others(operation.commit)
            if operation.is_ready:
                return True
            left = _WAIT_S if deadline is None else deadline - time.monotonic()
            if left < 0:
                return False
            alone = len(self._commits) == 1
            _sleep(native, min(left, _WAIT_S if alone else pause_s))
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _advance_others(self, commit: Commit) -> None:
        """Enters barriers that other ranks may wait for while this one waits for something else."""
        for other in list(self._commits):
            if other is not commit and other.is_sealed:
                self._next(other)

    def _next(self, commit: Commit, early: HeldOperation | None = None) -> _ronde.Operation | None:
        """Advances a commit, also over losses. Returns the native operation that it waits for.

        early -- an operation that the program waits for now, which may be before the commit is sealed
        """
        for _ in range(_LOSSES_MAX):
            try:
                return self._step(commit, early)
            except PeerLostError as failure:
                with contextlib.suppress(RondeError):  # operations have got it as their error
                    self._recover(failure)
        return None

    def _step(self, commit: Commit, early: HeldOperation | None) -> _ronde.Operation | None:
        if early is not None and not commit.is_sealed:
            return self._step_early(early)
        while commit.waiting:
            operation = commit.waiting[0]
            if operation.native is not None and not is_complete(operation.native):
                return operation.native
            if operation.native is not None:
                operation.finish()
            commit.waiting.popleft()
        if commit.is_done or not commit.is_sealed:
            return None
        return self._step_barrier(commit)

    def _step_early(self, operation: HeldOperation) -> _ronde.Operation | None:
        if operation.native is not None and not is_complete(operation.native):
            return operation.native
        if operation.native is not None:
            operation.finish()
        if not operation.is_ready:
            operation.is_early = True
            operation.give()
        return None

    def _step_barrier(self, commit: Commit) -> _ronde.Operation | None:
        error: RondeError | None = commit.given_up()
        try:
            if error is None and commit.needs_barrier():
                if commit.barrier is None:
                    commit.barrier = self._enter_barrier(commit)
                if not is_complete(commit.barrier):
                    return commit.barrier
                commit.barrier.shape()
        except PeerLostError:
            raise
        except ShutDownError:
            pass  # no rank is lost, so this rank keeps what is complete here
        except RondeError as failure:
            error = failure
        self._end(commit, error)
        return None

    def _end(self, commit: Commit, error: RondeError | None = None) -> None:
        commit.end(error)
        if commit in self._commits:
            del self._commits[commit]
            self._names.end(commit)

    def _enter_barrier(self, commit: Commit) -> _ronde.Operation:
        """Enters the barrier: an all-reduce of one element, because the schedule of a step cannot contain a barrier."""
        name = f"ronde.commit.{commit.name}"
        return self.session.submit("allreduce", "int32", (1,), address_of(_ONE), _ONE.nbytes, name=name, op=Sum)

    # === Recovery ===

    def _recover(self, failure: PeerLostError) -> None:
        """Waits for the next membership and replays the interrupted operations in it.

        Raises the failure if that is not possible; then all operations in flight have failed.
        """
        for _ in range(_LOSSES_MAX):
            if self._over is not None:
                self._fail_all(self._over)
                raise self._over
            began = time.monotonic()
            verdict = self._enter_next_membership(failure)
            entered = time.monotonic()
            try:
                replayed = self._apply(verdict, failure)
            except PeerLostError as another:
                if another is self._over:
                    raise
                failure = another
                continue
            _log.info(
                "continued as rank %d of %d and replayed %d operations, after %.3f s for the membership and %.3f s: %s",
                *(self.session.rank, self.session.size, replayed, entered - began, time.monotonic() - entered),
                str(failure).partition("\n")[0],
            )
            return
        raise failure

    def _enter_next_membership(self, failure: PeerLostError) -> Verdict:
        """Replaces the session. If that fails, all operations in flight fail, and it raises the failure."""
        try:
            self._take_outcomes()
            self.session.close()
            self.session, verdict = membership.connected(self._joined)
            self._enter(verdict)
            self.on_session(self.session)
        except BaseException as error:
            self._over = failure if isinstance(error, RondeError) else _extended(failure, repr(error))
            self._fail_all(self._over)
            if isinstance(error, RondeError):
                raise self._over from error
            raise
        return verdict

    def _joined(self) -> tuple[_ronde.Session, Verdict]:
        """Opens a session and exchanges reports with the other ranks of its membership."""
        session = self._open_session()
        try:
            text = numpy.frombuffer(encode(self._report()), dtype=numpy.uint8)
            tensor = ("uint8", text.shape, text.ctypes.data, text.nbytes)
            gathered = session.submit("allgather", *tensor, name="ronde.replay.reports")
            deadline = time.monotonic() + membership.timeout_s()
            while not gathered.wait(_WAIT_S):
                for notice in session.take_notices():
                    _log.warning("%s", notice)  # names the ranks that have not reported
                if time.monotonic() > deadline:
                    raise TimedOutError(_NO_REPORTS, "timed_out", blame="peer")
            received = numpy.empty(gathered.shape()[0], dtype=numpy.uint8)
            gathered.read_into(received.ctypes.data, received.nbytes)
            return session, decide(decode(received.tobytes()))
        except BaseException:
            session.close()
            raise

    def _report(self) -> Report:
        if not self._has_begun:
            return Report(self._worker)
        pending = frozenset(commit.key for commit in self._commits if commit.is_pending())
        given = frozenset(commit.key for commit in self._commits if commit.has_early())
        return Report(self._worker, False, self.refusal(), pending, given)

    def _enter(self, verdict: Verdict) -> None:
        self._workers = verdict.workers
        self._has_begun = True

    def _operations(self) -> list[HeldOperation]:
        return [operation for commit in self._commits for operation in commit.members]

    def _take_outcomes(self) -> None:
        """Finds out which operations are complete here. The epoch has ended, so none of them is in flight."""
        deadline = time.monotonic() + _OUTCOME_TIMEOUT_S
        for operation in self._operations():
            while operation.native is not None and not is_complete(operation.native):
                if time.monotonic() > deadline:
                    raise RondeError(f"{operation.name} is still in flight after its epoch", "protocol", blame="bug")
                time.sleep(_PAUSE_MIN_S)  # another thread takes its outcome
            if operation.native is not None:
                try:
                    operation.finish()
                except PeerLostError:
                    operation.native = None
        for commit in self._commits:
            commit.barrier = None

    def _apply(self, verdict: Verdict, failure: PeerLostError) -> int:
        """Completes operations that are complete on all ranks, and replays the others. Returns how many these are."""
        refusal = None if verdict.refusal is None else _extended(failure, verdict.refusal)
        interrupted: list[HeldOperation] = []
        for commit in list(self._commits):
            if commit.key not in verdict.replayed:
                self._end(commit)
            elif refusal is not None:
                self._end(commit, refusal)
            else:
                interrupted += self._to_replay(commit, failure)
        if refusal is not None:
            self._over = refusal
            self.session.close()  # so that new workers do not wait for this one
            raise refusal
        for together in _batches(interrupted):
            self._replay(together)
        return len(interrupted)

    def _to_replay(self, commit: Commit, failure: PeerLostError) -> list[HeldOperation]:
        """Makes the operations of a commit pending again, and returns them."""
        for operation in commit.members:
            if not self._moves(operation.request):
                operation.fail(failure)
        commit.waiting = deque(operation for operation in commit.members if not operation.is_ready)
        for operation in commit.waiting:
            operation.forget_result()
        return list(commit.waiting)

    def _moves(self, request: Request) -> bool:
        """Gives a broadcast the current rank of its root. Returns whether there is one."""
        if request.root_worker is None:
            return True
        if request.root_worker not in self._workers:
            return False
        request.options["root"] = self._workers.index(request.root_worker)
        return True

    def _replay(self, operations: list[HeldOperation]) -> None:
        try:
            self._send(self.session, operations)
        except RefusedError as error:
            for operation in operations:
                operation.fail(error)

    def _fail_all(self, error: RondeError) -> None:
        for commit in list(self._commits):
            self._end(commit, error)


class _Joining:
    """Sets the commit of a thread's operations."""

    def __init__(self, of_thread: threading.local, commit: Commit) -> None:
        self._of_thread, self._commit = of_thread, commit

    def __enter__(self) -> None:
        self._of_thread.commit = self._commit

    def __exit__(self, *_: object) -> None:
        self._of_thread.commit = None


class _Names:
    """Names of operations and identities of commits, the same on all ranks, whatever their sessions have seen.

    The identity contains how many commits of its name were before: one rank may have an operation in flight that
    another rank has not begun, because it still waits for the last one of that name.
    """

    def __init__(self) -> None:
        self._unnamed: Counter[tuple[str, bool]] = Counter()
        self._done: dict[str, int] = {}
        self._live: Counter[str] = Counter()
        self._generation = 0

    def restart(self) -> None:
        """Begins again."""
        self._unnamed.clear()
        self._done.clear()
        self._generation += 1

    def resolve(self, kind: str, name: str | None, is_group: bool) -> str:
        """Returns the name of the next operation. Those without one are numbered in call order."""
        if name is not None:
            return name
        number = self._unnamed[kind, is_group]
        return f"noname.{self._generation}.{'group.' if is_group else ''}{number}"

    def take(self, kind: str, given: str | None, is_group: bool) -> None:
        """Counts an operation that was submitted."""
        if given is None:
            self._unnamed[kind, is_group] += 1

    def check(self, commit: Commit, is_named: bool) -> None:
        """Raises RefusedError if there are too many names."""
        if is_named and commit.name not in self._done and len(self._done) >= NAMES_MAX:
            raise RefusedError(
                f"operations of this client have had {NAMES_MAX} different names, the most with on_failure="
                f'"{CONTINUE}"; give an operation that repeats the same name each time, or no name',
                "limit",
            )

    def begin(self, commit: Commit, is_named: bool) -> None:
        """Identifies a commit, after its first operation was submitted."""
        commit.is_named, commit.generation = is_named, self._generation
        if is_named:
            commit.occurrence = self._done.get(commit.name, 0) + self._live[commit.name]
            self._live[commit.name] += 1

    def end(self, commit: Commit) -> None:
        """Counts a commit, unless all of its operations have failed: other ranks may not have submitted them."""
        if commit.is_named:
            self._live[commit.name] -= 1
            if self._live[commit.name] == 0:
                del self._live[commit.name]
            if commit.generation == self._generation and any(each.error is None for each in commit.members):
                self._done[commit.name] = self._done.get(commit.name, 0) + 1


def _batches(operations: list[HeldOperation]) -> list[list[HeldOperation]]:
    """Returns operations as they are submitted again: groups together, and the others one by one.

    If any rank has not submitted a group yet, no member has failed on any rank. So where a part of a group is left, all
    ranks had submitted it, and all of them submit the same part.
    """
    batches: dict[object, list[HeldOperation]] = {}
    for operation in operations:
        batches.setdefault(operation.group or operation, []).append(operation)
    return list(batches.values())


def _extended(failure: PeerLostError, why: str) -> PeerLostError:
    """Returns a failure with the reason why operations in flight could not continue without the lost rank."""
    text = f"{str(failure).rstrip('.')}. Operations in flight could not continue: {why}"
    parts = (failure.cause, failure.rank, failure.sidecar, failure.tensor, failure.blame, failure.record)
    return type(failure)(text, *parts)


def _sleep(native: _ronde.Operation | None, timeout_s: float) -> None:
    """Waits until a native operation is complete or has failed, or for the time."""
    if native is None:
        return
    try:
        native.wait(max(0.0, timeout_s))
    except RondeError:
        raise
    except RuntimeError:
        time.sleep(_PAUSE_MIN_S)  # another thread waits for it
