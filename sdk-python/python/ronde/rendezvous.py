"""The rendezvous of a job's ranks over a key-value store, before they have a sidecar.

Rank 0 begins a round: it writes a random number that identifies the round. Every other rank answers with its own
identity and that number. Rank 0 waits for all answers, decides, and writes the outcome: the directory of a sidecar for
all of them, or why there is none. A rank takes only an outcome that has its own random number, so values of an earlier
round in the same store, or of another job, mislead nobody.

The store is not trusted: what it holds is parsed as JSON with known fields. Whoever can write to it can keep a job from
starting, and can name any session directory. A rank other than 0 uses one only if it is a private directory of its own
user, and sends a worker's messages only to a process of that user, by the kernel's word: `ronde.connect` gets
`sidecar_uid` (test `a_sidecar_of_another_user_gets_nothing` of the Rust client). Whether it is the sidecar of this job,
and not another one of the same user, only the store says.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Protocol

from ronde.errors import RondeError, TimedOutError
from ronde.own_sidecar import LOCAL_RANKS_MAX, START_TIMEOUT_S
from ronde.processes import HostIdentity, ProcessIdentity, is_alive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_BEGIN, _OUTCOME, _ANSWER = "ronde/begin", "ronde/outcome", "ronde/answer"
_POLL_INTERVAL_S = 0.02
# The longest wait in the store: between waits, a rank checks whether it was interrupted or replaced.
_WAIT_SLICE_S = 1.0
# A rank waits for as many rounds of rank 0, each of the longest time that one may take.
_ROUNDS_MAX = 3
# For each rank that is missing when the time is over: whether its answer is there after all.
_LAST_WAIT_S = 0.05
_PENDING, _READY, _FAILED = "pending", "ready", "failed"
# The names of ranks in a message.
_NAMED_MAX = 16

_ONE_NAME = (
    "Two jobs have one name or one store at the same time, or the starter gave two processes one rank. Give each job "
    "its own ID and port (torchrun: --rdzv-id and --master-port; env://: MASTER_PORT), and each process its own rank"
)
WAYS = (
    "start the program with `ronde run -np N -H host:slots,... COMMAND`; or start a `ronde sidecar` on each host, with "
    "a certificate directory (--certs) or the job's secret (--job-secret-file), and set RONDE_SOCKET to its session "
    "directory and RONDE_JOB to the job's name for each process (docs/KEYS.md)"
)


class Store(Protocol):
    """A key-value store that all ranks share, such as one of PyTorch's.

    If it has a method `wait(keys, timeout)`, as PyTorch's have, `get` is called for keys that exist only. Otherwise
    `get` must raise an exception if there is no value within a few seconds.
    """

    def set(self, key: str, value: bytes) -> Any:
        """Writes a value, or replaces it."""

    def get(self, key: str) -> bytes:
        """Returns a value; waits until there is one."""


class Sidecar(NamedTuple):
    """A sidecar.

    socket  -- its session directory
    job     -- the name of its job
    starter -- the process that started it, with which it ends
    """

    socket: str
    job: str
    starter: ProcessIdentity


@dataclass(frozen=True)
class Member:
    """One of a job's processes, as it reports itself.

    rank, size -- as its starter set them
    host       -- where it runs
    user       -- its effective user ID
    process    -- its identity on its host
    served     -- whether its environment names a sidecar that runs already
    nonce      -- a random number that no other process has
    """

    rank: int
    size: int
    host: HostIdentity
    user: int
    process: ProcessIdentity
    served: bool = False
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def described(self) -> str:
        """Returns this process for a message."""
        return f"process {self.process.pid} on {self.host.name}"


@dataclass(frozen=True)
class _Outcome:
    """What rank 0 reports to all.

    round   -- rank 0's nonce
    state   -- whether the ranks may connect
    ranks   -- the nonce and a description of each rank's process, and its identity
    sidecar -- for all ranks; None if all have their own
    reason, cause -- of a failure
    """

    round: str
    state: str = _PENDING
    ranks: Sequence[tuple[str, str, ProcessIdentity]] = ()
    sidecar: Sidecar | None = None
    reason: str = ""
    cause: str = ""


def meet(
    me: Member,
    store: Store,
    timeout: float,
    start: Callable[[], Sidecar],
    *,
    joins_again: bool = False,
    place: str | None = None,
) -> Sidecar | None:
    """Meets all ranks of the job and returns their sidecar; None if each rank's environment names one.

    timeout     -- seconds to wait for the others to come
    start       -- starts the sidecar, on rank 0
    joins_again -- whether a process that replaces one that has ended takes the sidecar of the round before
    place       -- the directory that is the store, for messages: ranks in containers may not share it

    Raises RondeError with cause "settings" if the ranks do not fit together or cannot share a sidecar, and "connect"
    if the sidecar or the store fails; TimedOutError with cause "start" if a rank does not come, which the text names.
    """
    if me.rank == 0:
        return _lead(me, store, timeout, start, _apart_hint(place))
    return _follow(_Follower(me, store, timeout, joins_again, _apart_hint(place)))


def _apart_hint(place: str | None) -> str:
    """Returns what to do where ranks do not see each other's store."""
    if place is None:
        return ""
    return (
        f". If ranks run in containers of their own, mount the directory of {place} into all of them, or name another "
        "one in XDG_RUNTIME_DIR"
    )


def problem(members: Mapping[int, Member]) -> str | None:
    """Returns why these processes are not one job that a sidecar of one host can serve; None if they are.

    members -- by the rank that each is expected to have; all that came
    """
    first = members[0]
    for rank, member in sorted(members.items()):
        if member.size != first.size:
            return (
                f"the ranks disagree on the number of processes: rank 0 ({first.described()}) was started as one of "
                f"{first.size}, rank {rank} ({member.described()}) as one of {member.size}; start all with one number"
            )
        if member.rank != rank:
            return f"{member.described()} answered as rank {rank}, but it is rank {member.rank}"
    served = {rank: member.served for rank, member in members.items()}
    if all(served.values()):
        return None
    if any(served.values()):
        with_one = [rank for rank in served if served[rank]]
        without = [rank for rank in served if not served[rank]]
        return (
            f"{_ranks(with_one)} found a sidecar that runs already (RONDE_SOCKET, RONDE_JOB, or the usual directory), "
            f"{_ranks(without)} did not; set both variables for all processes, or for none"
        )
    return _apart(members) or (_too_many(first.size))


def _apart(members: Mapping[int, Member]) -> str | None:
    """Returns why processes of several hosts or users cannot begin by themselves."""
    first = members[0]
    others = [rank for rank, member in sorted(members.items()) if not member.host.is_same(first.host)]
    if others:
        names = sorted({members[rank].host.name for rank in others})
        same = first.host.name in names
        note = " in another network namespace" if same else ""
        return (
            f"the job's {first.size} processes are on several hosts: rank 0 on {first.host.name}, {_ranks(others)} on "
            f"{', '.join(names[:_NAMED_MAX])}{note}. Without a launcher or sidecars of ronde they share no secret by "
            f"which hosts could authenticate each other, and a store such as that of MASTER_ADDR cannot replace one. "
            f"Instead, {WAYS}"
        )
    users = [rank for rank, member in sorted(members.items()) if member.user != first.user]
    if users:
        return (
            f"rank 0 runs as user {first.user}, {_ranks(users)} as user {members[users[0]].user}: processes that share "
            "a sidecar without a launcher must be of one user"
        )
    return None


def _too_many(size: int) -> str | None:
    if size <= LOCAL_RANKS_MAX:
        return None
    return (
        f"the job has {size} processes on one host, and a sidecar serves at most {LOCAL_RANKS_MAX}; start the program "
        f"with `ronde run -np {size} --sidecars {-(-size // LOCAL_RANKS_MAX)} COMMAND`"
    )


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:_NAMED_MAX]))
    more = f" and {len(ranks) - _NAMED_MAX} more" if len(ranks) > _NAMED_MAX else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}{more}"


# === Rank 0 ===


def _lead(me: Member, store: Store, timeout: float, start: Callable[[], Sidecar], hint: str) -> Sidecar | None:
    _check_free(me, store)
    # The outcome first, so that whoever has read the beginning can read it.
    _write_outcome(store, _Outcome(me.nonce))
    _write(store, _BEGIN, {"member": asdict(me)})
    try:
        return _decide(me, store, timeout, start, hint)
    except RondeError as error:
        _report(me, store, error)
        raise
    except Exception as error:
        failure = RondeError(f"rank 0 ({me.described()}) failed: {type(error).__name__}: {error}", "connect")
        _report(me, store, failure)
        raise failure from error
    except BaseException as error:
        _report(me, store, RondeError(f"rank 0 ({me.described()}) was ended by {type(error).__name__}", "connect"))
        raise


def _decide(me: Member, store: Store, timeout: float, start: Callable[[], Sidecar], hint: str) -> Sidecar | None:
    members = _answers(me, store, timeout, hint)
    if reason := problem(members):
        raise RondeError(reason, "settings")
    sidecar = None if me.served else start()
    _check_answers(me, store, members)
    ranks = [(each.nonce, each.described(), each.process) for _, each in sorted(members.items())]
    _write_outcome(store, _Outcome(me.nonce, _READY, ranks, sidecar))
    return sidecar


def _report(me: Member, store: Store, error: RondeError) -> None:
    # The first error is the one to raise.
    with contextlib.suppress(Exception):
        _write_failure(me, store, error)


def _write_failure(me: Member, store: Store, error: RondeError) -> None:
    """Reports a failure to the other ranks, unless another process has begun a round meanwhile."""
    begin = _read(store, _BEGIN, _WAIT_SLICE_S)
    if begin is not None and _member(begin.get("member")).nonce == me.nonce:
        _write_outcome(store, _Outcome(me.nonce, _FAILED, reason=str(error), cause=error.cause))


def _answers(me: Member, store: Store, timeout: float, hint: str) -> dict[int, Member]:
    """Waits for the answers of all ranks. Raises TimedOutError that names those that are missing."""
    deadline = time.monotonic() + timeout
    members = {0: me}
    for rank in range(1, me.size):
        while rank not in members:
            rest = deadline - time.monotonic()
            _check_alone(me, store)
            answer = _read(store, f"{_ANSWER}/{rank}", min(max(rest, _LAST_WAIT_S), _WAIT_SLICE_S))
            if answer is not None and answer.get("round") == me.nonce:
                members[rank] = _answered(answer)
                if members[rank].size != me.size:
                    return members
            elif rest <= 0:
                break
            elif answer is not None:
                time.sleep(_POLL_INTERVAL_S)
    missing = [rank for rank in range(me.size) if rank not in members]
    if missing and problem(members) is None:
        raise TimedOutError(
            f"{_ranks(missing)} of {me.size} did not come within {timeout:.0f} s, {len(members)} did: the starter has "
            "started too few processes, or these have ended or do not call init(); their output says why. If they "
            f"only need more time, raise RONDE_START_TIMEOUT{hint}",
            "start",
        )
    return members


def _check_answers(me: Member, store: Store, members: dict[int, Member]) -> None:
    """Reads all answers again. Raises RondeError if another process has answered as one of the ranks."""
    for rank in range(1, me.size):
        again = _read(store, f"{_ANSWER}/{rank}", _WAIT_SLICE_S)
        if again is not None:
            first, members[rank] = members[rank], _answered(again)
            if first.nonce != members[rank].nonce and not _has_ended(first, me):
                raise _twice(first, members[rank])


def _has_ended(member: Member, me: Member) -> bool:
    """Returns whether a process is known to have ended; the starter may have started its rank again."""
    return member.host.is_same(me.host) and not is_alive(member.process)


def _answered(answer: Mapping[str, Any]) -> Member:
    """Returns who has answered. Raises RondeError if two processes have, as one rank."""
    member = _member(answer.get("member"))
    if "conflict" in answer:
        raise _twice(member, _member(answer["conflict"]))
    return member


def _twice(one: Member, other: Member) -> RondeError:
    return RondeError(
        f"two processes answered as rank {one.rank}: {one.described()} and {other.described()}. {_ONE_NAME}", "settings"
    )


def _check_free(me: Member, store: Store) -> None:
    """Raises RondeError if another process of this host that lives has begun a round that is open."""
    begin = _read(store, _BEGIN, _LAST_WAIT_S)
    outcome = None if begin is None else _outcome(_read(store, _OUTCOME, _LAST_WAIT_S))
    if begin is None or outcome is None or outcome.state != _PENDING:
        return
    other = _member(begin.get("member"))
    is_open = outcome.round == other.nonce and other.host.is_same(me.host) and is_alive(other.process)
    if is_open and other.process != me.process:
        raise _begun_twice(me, other)


def _begun_twice(me: Member, other: Member) -> RondeError:
    return RondeError(
        f"two processes began as rank 0: {me.described()} and {other.described()}. {_ONE_NAME}", "settings"
    )


def _check_alone(me: Member, store: Store) -> None:
    """Raises RondeError if another process has begun a round in this store."""
    begin = _read(store, _BEGIN, _WAIT_SLICE_S)
    if begin is None:
        raise RondeError("the store has lost the value that rank 0 wrote", "connect")
    other = _member(begin.get("member"))
    if other.nonce != me.nonce:
        raise _begun_twice(me, other)


# === The other ranks ===


def _follow(follower: _Follower) -> Sidecar | None:
    while time.monotonic() < follower.deadline:
        outcome = follower.poll()
        if outcome is not None:
            return outcome.sidecar
        time.sleep(_POLL_INTERVAL_S)
    raise follower.timed_out()


class _Follower:
    """A rank other than 0: answers each round that rank 0 begins, until one has an outcome for this process."""

    def __init__(self, me: Member, store: Store, timeout: float, joins_again: bool, hint: str) -> None:
        self._me, self._store, self._timeout, self._joins_again = me, store, timeout, joins_again
        self._hint = hint
        self.deadline = time.monotonic() + timeout
        # Each round that begins moves the deadline, to this one at most.
        self._cap_s = _ROUNDS_MAX * (timeout + START_TIMEOUT_S)
        self._cap = time.monotonic() + self._cap_s
        self._key = f"{_ANSWER}/{me.rank}"
        self._lead: Member | None = None
        # Whether the round was open when this process came, and rank 0 not known to have ended.
        self._was_pending = False
        self._rounds = 0
        self._foreign: _Outcome | None = None

    def poll(self) -> _Outcome | None:
        """Returns the outcome for this process if there is one. Raises RondeError if the round has failed."""
        begin = _read(self._store, _BEGIN, min(_WAIT_SLICE_S, self._timeout))
        if begin is None:
            return None
        lead = _member(begin.get("member"))
        if self._lead is None or lead.nonce != self._lead.nonce:
            self._answer(lead)
        outcome = _outcome(_read(self._store, _OUTCOME, _WAIT_SLICE_S))
        is_over = outcome is not None and outcome.round == lead.nonce and outcome.state == _READY
        if outcome is not None and is_over and self._is_mine(outcome, lead):
            return outcome
        self._check_answer(lead)
        if outcome is None or outcome.round != lead.nonce:
            return None
        if outcome.state == _PENDING:
            return None
        if self._was_pending and outcome.state == _FAILED:
            raise _failure(outcome)
        if self._was_pending:
            _check_size(self._me, lead)
        if self._foreign is None:
            # Perhaps of an earlier round, after which rank 0 begins another. For its sidecar nobody waits any more.
            self.deadline = min(self.deadline, time.monotonic() + self._timeout)
        self._foreign = outcome
        return None

    def _answer(self, lead: Member) -> None:
        # Before the answer: a round that fails after it concerns this process, one that failed before it does not.
        outcome = _outcome(_read(self._store, _OUTCOME, _WAIT_SLICE_S))
        is_open = outcome is not None and outcome.round == lead.nonce and outcome.state == _PENDING
        self._was_pending = is_open and not _has_ended(lead, self._me)
        self._lead, self._foreign, self._rounds = lead, None, self._rounds + 1
        answer: dict[str, Any] = {"round": lead.nonce, "member": asdict(self._me)}
        others = _read(self._store, self._key, _LAST_WAIT_S)
        if others is not None and others.get("round") == lead.nonce:
            other = _member(others.get("member"))
            if not _has_ended(other, self._me):
                # Rank 0 cannot know which of both is of its job.
                answer["conflict"] = asdict(other)
        _write(self._store, self._key, answer)
        # Rank 0 waits for the others, then for the sidecar. After a round that is over it may begin another.
        deadline = time.monotonic() + self._timeout + (START_TIMEOUT_S if self._was_pending else 0)
        self.deadline = min(deadline, self._cap)

    def _check_answer(self, lead: Member) -> None:
        """Raises RondeError if another process has answered as this rank."""
        answer = _read(self._store, self._key, _WAIT_SLICE_S)
        other = self._me if answer is None else _member(answer.get("member"))
        if answer is not None and answer.get("round") == lead.nonce and other.nonce != self._me.nonce:
            # For rank 0, which may have taken either.
            _write(self._store, self._key, {**answer, "conflict": asdict(self._me)})
            raise _twice(self._me, other)

    def _is_mine(self, outcome: _Outcome, lead: Member) -> bool:
        me = self._me
        if me.rank >= len(outcome.ranks) or lead.size != me.size:
            return False
        nonce, _, process = outcome.ranks[me.rank]
        if nonce == me.nonce:
            return True
        is_here = lead.host.is_same(me.host)
        return self._joins_again and is_here and is_alive(lead.process) and not is_alive(process)

    def _did_not_come(self) -> RondeError:
        """Returns the error if no rank 0 has come, or one that had ended before this process came."""
        lead, foreign, earlier = self._lead, self._foreign, ""
        if lead is not None:
            earlier = f". An earlier one ({lead.described()}) had ended before this process came"
        if foreign is not None and foreign.state == _FAILED:
            earlier += f": {foreign.reason}"
        return TimedOutError(
            f"rank 0 of {self._me.size} did not come within {self._timeout:.0f} s: it was not started, has ended or "
            "does not call init(); its output says why. If it only needs more time, raise RONDE_START_TIMEOUT"
            f"{self._hint}{earlier}",
            "start",
        )

    def timed_out(self) -> RondeError:
        """Returns the error after the deadline."""
        me, lead, foreign = self._me, self._lead, self._foreign
        if lead is None or (not self._was_pending and _has_ended(lead, me)):
            return self._did_not_come()
        if self.deadline == self._cap:
            return TimedOutError(
                f"rank 0 (the last is {lead.described()}) has begun {self._rounds} times within {self._cap_s:.0f} s "
                "and never reported a sidecar: its starter starts it again, or it calls init() again after failures; "
                "its output says why",
                "start",
            )
        if foreign is not None and foreign.state == _FAILED:
            return _failure(foreign)
        if foreign is not None and lead.size != me.size:
            return RondeError(problem({0: lead, me.rank: me}) or "the ranks disagree", "settings")
        if foreign is not None:
            other = foreign.ranks[me.rank][1] if me.rank < len(foreign.ranks) else "no process"
            return RondeError(
                f"rank 0 ({lead.described()}) has begun a job in which {other} is rank {me.rank}, not this process "
                f"({me.described()}). {_ONE_NAME}",
                "settings",
            )
        ended = " and has ended" if _has_ended(lead, me) else ""
        return TimedOutError(
            f"rank 0 ({lead.described()}) has come{ended}, but has not reported a sidecar within "
            f"{self._timeout + START_TIMEOUT_S:.0f} s; its output says why",
            "start",
        )


def _check_size(me: Member, lead: Member) -> None:
    """Raises RondeError if rank 0, whose round is complete without this process, has another size."""
    if lead.size != me.size and not _has_ended(lead, me):
        reason = problem({0: lead, me.rank: me})
        raise RondeError(reason or "the ranks disagree on the number of processes", "settings")


def _failure(outcome: _Outcome) -> RondeError:
    if outcome.cause == "start":
        return TimedOutError(outcome.reason, "start")
    return RondeError(outcome.reason, outcome.cause)


# === Values in the store ===


def _read(store: Store, key: str, timeout: float) -> dict[str, Any] | None:
    """Returns a value; None if there is none within the timeout. Raises RondeError if the store fails."""
    wait, check = getattr(store, "wait", None), getattr(store, "check", None)
    begun = time.monotonic()
    try:
        # PyTorch's store in a file waits for a second at least.
        if check is not None and timeout <= _LAST_WAIT_S and not check([key]):
            return None
        if wait is not None:
            wait([key], datetime.timedelta(seconds=timeout))
        text = store.get(key)
    except RondeError:
        raise
    except Exception as error:
        # Stores raise exceptions of several classes when a key is missing, and the same when a connection fails.
        if wait is not None and time.monotonic() - begun < timeout / 2:
            raise RondeError(f"the store of the rendezvous failed ({key}): {error}", "connect") from error
        time.sleep(_POLL_INTERVAL_S)
        return None
    try:
        value = json.loads(bytes(text))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _foreign(key)
    return value


def _write(store: Store, key: str, value: Mapping[str, Any]) -> None:
    """Writes a value. Raises RondeError if the store fails."""
    try:
        store.set(key, json.dumps(value).encode())
    except RondeError:
        raise
    except Exception as error:
        raise RondeError(f"the store of the rendezvous failed ({key}): {error}", "connect") from error


def _write_outcome(store: Store, outcome: _Outcome) -> None:
    _write(store, _OUTCOME, asdict(outcome))


def _member(value: Any) -> Member:
    try:
        fields = {**value, "host": HostIdentity(*map(str, value["host"])), "process": _process(value["process"])}
        member = Member(**fields)
        numbers = [member.rank, member.size, member.user]
    except (TypeError, KeyError, ValueError) as error:
        raise _foreign("a process") from error
    if not all(isinstance(number, int) for number in numbers) or not isinstance(member.nonce, str):
        raise _foreign("a process")
    return member


def _outcome(value: dict[str, Any] | None) -> _Outcome | None:
    if value is None:
        return None
    try:
        ranks = [(str(nonce), str(text), _process(process)) for nonce, text, process in value["ranks"]]
        sidecar = None if value["sidecar"] is None else _sidecar(value["sidecar"])
        return _Outcome(**{**value, "ranks": ranks, "sidecar": sidecar})
    except (TypeError, KeyError, ValueError) as error:
        raise _foreign(_OUTCOME) from error


def _sidecar(value: Any) -> Sidecar:
    socket, job, starter = value
    return Sidecar(str(socket), str(job), _process(starter))


def _process(value: Any) -> ProcessIdentity:
    pid, started, pids = value
    return ProcessIdentity(int(pid), int(started), str(pids))


def _foreign(key: str) -> RondeError:
    return RondeError(
        f"the value of {key} in the store is not one that ronde of this release wrote; use one release on all hosts",
        "protocol",
    )
