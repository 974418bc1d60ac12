"""Which nodes may begin a round under `torchrun --nnodes MIN:MAX`: all small cases, and random histories."""

from __future__ import annotations

import itertools
import json
import random

import pytest

pytest.importorskip("torch")

from ronde.torchrun.quorum import (
    STATE_BYTES_MAX,
    Enter,
    Proposal,
    Propose,
    Round,
    State,
    Wait,
    decide,
    decode,
    is_majority,
    newest,
    objection,
)

OPTIONS = (("--nnodes", "1:4"),)
BALLOT = "0123456789abcdef"


def subsets(nodes: range) -> list[tuple[int, ...]]:
    return [each for size in range(1, len(nodes) + 1) for each in itertools.combinations(nodes, size)]


def test_of_nodes_that_do_not_reach_each_other_one_part_at_most_begins() -> None:
    """For all last rounds of up to six nodes, and all parts with any newcomers."""
    for last in subsets(range(6)):
        for part in subsets(range(6)):
            others = tuple(node for node in range(6) if node not in part)
            both = is_majority(part, Round(1, last)) and is_majority(others, Round(1, last))
            assert not both, (last, part, others)
        halves = [part for part in subsets(range(6)) if 2 * len(set(part) & set(last)) == len(last)]
        # Of two equal halves exactly one goes on.
        for part in halves:
            others = tuple(node for node in last if node not in part)
            assert is_majority(part, Round(1, last)) != is_majority(others, Round(1, last))


@pytest.mark.parametrize("nodes_min", [1, 2])
def test_random_partitions_deaths_and_returns_leave_one_world(nodes_min: int) -> None:
    """Nodes remember the newest round that they know. A part of the network begins a round whenever it may.

    Each round that trains has a node of the one that has trained before, which therefore is over.
    """
    begun = 0
    for seed in range(2000):
        chance, count = random.Random(seed), 5
        states = dict.fromkeys(range(count), State(OPTIONS, True, Round(0, tuple(range(count)))))
        trained = [Round(0, tuple(range(count)))]
        for _ in range(12):
            cut = [chance.randrange(3) for _ in range(count)]
            alive = [node for node in range(count) if chance.random() < 0.8]
            for part in range(3):
                reached = [node for node in alive if cut[node] == part]
                if not reached:
                    continue
                known = newest([states[node] for node in reached])
                if objection(reached, known, nodes_min) is not None:
                    continue
                following = Round(known[-1].number + 1, tuple(reached))
                # Some may die before they note it, and some before they know that all have met.
                noting = [node for node in reached if seed % 3 or chance.random() < 0.7]
                for node in noting:
                    states[node] = states[node].noting(following)
                if noting != reached or chance.random() < 0.2:
                    continue
                assert following.number > trained[-1].number, (seed, trained, following)
                assert set(following.members) & set(trained[-1].members), (seed, trained, following)
                trained.append(following)
                for node in reached:
                    if chance.random() < 0.7:
                        states[node] = states[node].committing(following)
        begun += len(trained) - 1
    assert begun > 5000


def states(waiting: str, last: Round, proposal: Proposal | None = None) -> dict[int, State]:
    """The states of nodes 0, 1, ...: `w` waits, `t` trains, `-` is not reached. The lowest `w` has a proposal."""
    first = waiting.find("w")
    return {
        node: State(OPTIONS, each == "w", last, (), 0, proposal if node == first else None)
        for node, each in enumerate(waiting)
        if each != "-"
    }


FIRST = Round(0, (0, 1, 2, 3))
LATER = Round(4, (0, 1, 2))


@pytest.mark.parametrize(
    ("me", "waiting", "last", "nodes_min", "is_last_call", "expected"),
    [
        (0, "wwww", FIRST, 2, False, Propose((0, 1, 2, 3))),
        (0, "www-", FIRST, 2, False, "3 nodes have come, which are enough; more may come"),
        (0, "www-", FIRST, 2, True, Propose((0, 1, 2))),
        (0, "w---", FIRST, 2, True, "1 of at least 2 nodes have come"),
        (1, "-ww-", FIRST, 2, True, "2 of the 4 nodes of the job have come"),
        (0, "w--w", FIRST, 2, True, Propose((0, 3))),
        (1, "-ww-", LATER, 2, False, Propose((1, 2))),
        (1, "-wt-", LATER, 1, False, "1 of the 3 nodes of round 4 have come"),
        (1, "-wtw", LATER, 1, False, "1 of the 3 nodes of round 4 have come"),
        (1, "-wwt", LATER, 2, False, "2 nodes have come, which are enough"),
        (1, "-wwt", LATER, 2, True, Propose((1, 2))),
        (3, "--tw", LATER, 1, True, "0 of the 3 nodes of round 4 have come"),
        (2, "-ww-", LATER, 2, True, "node 1 proposes the next round"),
    ],
)
def test_decisions(
    me: int, waiting: str, last: Round, nodes_min: int, is_last_call: bool, expected: Propose | str
) -> None:
    decision = decide(me, states(waiting, last), nodes_min, 4, is_last_call, [])
    if isinstance(expected, str):
        assert isinstance(decision, Wait), decision
        assert expected in decision.reason
    else:
        assert decision == expected


@pytest.mark.parametrize(
    ("proposal", "failed", "is_entered"),
    [
        (Proposal(Round(5, (1, 2)), 7, BALLOT), [], True),
        (Proposal(Round(5, (1, 2)), 7, BALLOT), [BALLOT], False),  # its members have not met
        (Proposal(Round(5, (1, 3)), 7, BALLOT), [], False),  # without this node
        (Proposal(Round(4, (1, 2)), 7, BALLOT), [], False),  # of a node that knows less than this one
        (Proposal(Round(6, (1, 2)), 7, BALLOT), [], True),
        (Proposal(Round(5, (2, 3)), 7, BALLOT), [], False),  # no majority
    ],
)
def test_a_node_enters_what_may_begin(proposal: Proposal, failed: list[str], is_entered: bool) -> None:
    decision = decide(2, states("-ww-", LATER, proposal), 2, 4, False, failed)
    assert isinstance(decision, Enter) == is_entered
    # What the proposer knows, this node need not: the newest round counts.
    assert not isinstance(decide(2, states("-ww-", Round(9, (0, 1, 2)), proposal), 2, 4, False, failed), Enter)


def test_a_node_enters_what_faster_members_have_noted() -> None:
    proposal = Proposal(Round(5, (1, 2)), 7, BALLOT)
    known = states("-ww-", LATER, proposal)
    known[1] = known[1].noting(proposal.round)
    assert decide(2, known, 2, 4, False, []) == Enter(proposal)
    # Another round of this number may have begun.
    known[1] = known[1].noting(Round(5, (0, 1, 2)))
    assert isinstance(decide(2, known, 2, 4, False, []), Wait)


def test_what_was_noted_counts_until_a_later_round_is_committed() -> None:
    noted = State(OPTIONS, True, LATER).noting(Round(5, (0, 1, 2, 3))).noting(Round(6, (2, 3)))
    assert newest([noted]) == [LATER, Round(5, (0, 1, 2, 3)), Round(6, (2, 3))]
    assert newest([noted, State(OPTIONS, True, Round(5, (1, 2)))]) == [Round(5, (1, 2)), Round(6, (2, 3))]
    assert noted.noting(Round(7, (2, 3))).noted == (Round(5, (0, 1, 2, 3)), Round(7, (2, 3)))
    assert noted.committing(Round(6, (2, 3))) == State(OPTIONS, True, Round(6, (2, 3)))
    assert noted.committing(Round(4, (1, 2))) == noted
    assert objection((0, 1), newest([noted]), 2) is not None
    assert objection((0, 2), newest([noted]), 2) is None


def test_states_are_parsed() -> None:
    sent = State(OPTIONS, True, LATER, (Round(5, (0, 3)),), 3, Proposal(Round(5, (1, 2)), 4, BALLOT), "over")
    assert decode(sent.encode(), 4) == sent
    good = json.loads(sent.encode())
    wrong_rounds = [(2, [4, [0, 9]]), (2, [4, [2, 1]]), (2, [4, []]), (2, [-1, [0]])]
    for index, wrong in [*wrong_rounds, (3, 1), (4, "x"), (4, 1 << 60), (5, 7), (5, [[5, [1]], 4, "no"]), (0, 3)]:
        with pytest.raises(ValueError):  # noqa: PT011 - any text
            decode(json.dumps([wrong if at == index else each for at, each in enumerate(good)]).encode(), 4)
    for data in (b"", b"[1]", b"{", b"[" * 10_000, b"x" * (STATE_BYTES_MAX + 1), b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011 - any text
            decode(data, 4)
