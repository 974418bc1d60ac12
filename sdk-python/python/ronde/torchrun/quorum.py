"""Which nodes may begin a round: the rules of nodes that come and go. Decides only; nothing is sent or waited for.

A round is a start of the workers on some nodes, its members. Rounds are numbered from 1. The members of round 0, before
any has begun, are all nodes that the options name. A node notes a round before it meets the other members, and commits
it when all have met; nothing trains before. A round needs `nodes_min` members, and a majority of those of the newest
committed round that any of them knows, and of each later one that any has noted; of two equal halves, the one with that
round's lowest node. So each round that trains has a node of the one that trained before, which therefore is over.
docs/adr/0029-*.md has the proof.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

STATE_BYTES_MAX = 16 << 10
_NUMBER_MAX = 1 << 53


class Round(NamedTuple):
    """A round that nodes have begun.

    number  -- how many there were before
    members -- its nodes, ascending
    """

    number: int
    members: tuple[int, ...]


class Proposal(NamedTuple):
    """A round that the lowest waiting node proposes. It has begun when the agents of all members have met.

    attempt -- counts proposals of all rounds
    ballot  -- a random number, by which the members meet
    """

    round: Round
    attempt: int
    ballot: str


class State(NamedTuple):
    """What an agent shares with the others.

    options   -- that must be the same on all nodes, by their names
    waits     -- whether it waits for the next round
    committed -- the newest round of which it knows that all members have met
    noted     -- later ones whose members may have met
    attempt   -- the highest number of a proposal that it knows
    proposal  -- its own
    closed    -- why the job is over; empty if it is not
    """

    options: tuple[tuple[str, str], ...]
    waits: bool
    committed: Round
    noted: tuple[Round, ...] = ()
    attempt: int = 0
    proposal: Optional[Proposal] = None  # noqa: UP045 - evaluated by NamedTuple on Python 3.9
    closed: str = ""

    def encode(self) -> bytes:
        """Returns the bytes to send."""
        return json.dumps(self).encode()

    def noting(self, following: Round) -> State:
        """Returns the state of an agent that is about to meet the members of a round."""
        # Of several with the same members the last one says all.
        others = [each for each in self.noted if each.members != following.members]
        return self._replace(noted=(*others, following))

    def committing(self, round_: Round) -> State:
        """Returns the state of an agent that knows that the members of a round have met."""
        if round_.number <= self.committed.number:
            return self
        later = tuple(each for each in self.noted if each.number > round_.number)
        return self._replace(committed=round_, noted=later)


class Propose(NamedTuple):
    """This node proposes a round of these members."""

    members: tuple[int, ...]


class Enter(NamedTuple):
    """This node takes part in a proposal of another one."""

    proposal: Proposal


class Wait(NamedTuple):
    """Nothing can begin yet. The text says what for."""

    reason: str


Decision = Union[Propose, Enter, Wait]


def decode(data: bytes, count: int) -> State:
    """Parses another agent's state. Raises ValueError if it is none.

    count -- of all nodes
    """
    if len(data) > STATE_BYTES_MAX:
        raise ValueError("it is too long")
    try:
        options, waits, committed, noted, attempt, proposal, closed = json.loads(data)
        pairs = tuple((str(name), str(value)) for name, value in options)
        found = None if proposal is None else _proposal(proposal, count)
        later = tuple(_round(each, count) for each in noted)
        return State(pairs, bool(waits), _round(committed, count), later, _number(attempt), found, str(closed))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a state of an agent: {error}") from error


def _proposal(value: Any, count: int) -> Proposal:
    round_, attempt, ballot = value
    if not re.fullmatch(r"[0-9a-f]{16}", str(ballot)):
        raise ValueError("a ballot is no random number")
    return Proposal(_round(round_, count), _number(attempt), str(ballot))


def _round(value: Any, count: int) -> Round:
    number, members = value
    found = Round(_number(number), tuple(map(_number, members)))
    if not found.members or list(found.members) != sorted(set(found.members)) or found.members[-1] >= count:
        raise ValueError(f"{members!r} are not members of a round")
    return found


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= _NUMBER_MAX:
        raise ValueError(f"{value!r} is no number")
    return value


def newest(states: Collection[State]) -> list[Round]:
    """Returns the rounds of which a majority is needed, ascending: the committed one, and those that may have followed.

    Those that were noted with the number of a committed round, or a lower one, have never met.
    """
    committed = max((state.committed for state in states), key=lambda each: each.number)
    later = {each for state in states for each in state.noted if each.number > committed.number}
    return [committed, *sorted(later)]


def is_majority(members: Collection[int], last: Round) -> bool:
    """Returns whether these nodes may follow a round: no others may then."""
    common = set(members) & set(last.members)
    excess = 2 * len(common) - len(last.members)
    return excess > 0 or (excess == 0 and last.members[0] in common)


def objection(members: Collection[int], newest: Collection[Round], nodes_min: int) -> str | None:
    """Returns why these nodes cannot begin a round after the newest ones; None if they may."""
    if len(members) < nodes_min:
        return f"{len(members)} of at least {nodes_min} nodes have come"
    last = next((each for each in newest if not is_majority(members, each)), None)
    if last is None:
        return None
    which = f"round {last.number}" if last.number else "the job"
    common = len(set(members) & set(last.members))
    return (
        f"{common} of the {len(last.members)} nodes of {which} have come, and the others may train without these: a "
        f"majority is needed, or half of them with node {last.members[0]}. Where no other node trains any more, start "
        "the job with another --rdzv-id"
    )


def decide(
    me: int, states: Mapping[int, State], nodes_min: int, count: int, is_last_call: bool, failed: Collection[str]
) -> Decision:
    """Returns what this node, which waits for a round, does now.

    states       -- of the nodes that it reaches, itself included
    count        -- of all nodes
    is_last_call -- whether enough nodes have been there for as long as the job waits for more
    failed       -- ballots on which members have not met
    """
    last = newest(states.values())
    waiting = tuple(sorted(node for node, state in states.items() if state.waits))
    if waiting[0] != me:
        proposal = states[waiting[0]].proposal
        if proposal is not None and proposal.ballot not in failed and _is_acceptable(me, proposal, last, nodes_min):
            return Enter(proposal)
        return Wait(objection(waiting, last, nodes_min) or f"node {waiting[0]} proposes the next round")
    reason = objection(waiting, last, nodes_min)
    if reason is not None:
        return Wait(reason)
    # Of a later round, nodes that are not reached have left; before the first one they may still come.
    is_complete = len(waiting) == (len(states) if last[-1].number else count)
    if is_complete or is_last_call:
        return Propose(waiting)
    return Wait(f"{len(waiting)} nodes have come, which are enough; more may come")


def _is_acceptable(me: int, proposal: Proposal, last: list[Round], nodes_min: int) -> bool:
    """The proposer may know less than this node."""
    number, members = proposal.round
    # Members that were faster have noted it already.
    is_next = all(number > each.number or each == proposal.round for each in last)
    return me in members and is_next and objection(members, last, nodes_min) is None
