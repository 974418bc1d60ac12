"""Run by every rank of at least three: ranks form process sets of their own, without the others."""

from __future__ import annotations

import itertools
from typing import Callable

import numpy

import ronde

TIMEOUT_S = 60.0


def check_sum(client: ronde.Client, members: ronde.ProcessSet) -> None:
    """A set works: one process computes the same sum."""
    total = client.allreduce(numpy.full(3, 1.0 + client.rank), op=ronde.Sum, process_set=members)
    numpy.testing.assert_array_equal(total, numpy.full(3, float(sum(1 + rank for rank in members.ranks))))


def check_members_alone(client: ronde.Client) -> None:
    """The last rank takes no part, and gets to the barrier first."""
    last = client.size - 1
    if client.rank != last:
        members = client.add_process_set(reversed(range(last)), members_only=True)
        assert (members.ranks, members.rank()) == (list(range(last)), client.rank)
        check_sum(client, members)
        # It exists, so it is the result.
        assert client.add_process_set(range(last), members_only=True) is members
    client.barrier("alone")


def check_all_pairs(client: ronde.Client) -> None:
    """Sets of two ranks each, all in flight at once, and waited for in an order that differs from rank to rank."""
    pairs = [pair for pair in itertools.combinations(range(client.size), 2) if client.rank in pair]
    if client.rank % 2:
        pairs.reverse()
    handles = {pair: client.add_process_set_async(pair, members_only=True) for pair in pairs}
    again = {pair: client.add_process_set_async(pair, members_only=True) for pair in pairs}
    sets = {pair: handles[pair].wait(TIMEOUT_S) for pair in sorted(pairs)}
    assert all(again[pair].wait(TIMEOUT_S) is sets[pair] for pair in pairs)
    assert len({members.id for members in sets.values()}) == len(pairs)
    for pair in sorted(pairs):
        check_sum(client, sets[pair])


def check_however_made(client: ronde.Client) -> None:
    """A set that all ranks have added is found, and so is the one of all ranks."""
    added = client.add_process_set([0, client.size - 1])
    if added.included():
        assert client.add_process_set(added.ranks, members_only=True) is added
    assert client.add_process_set(range(client.size), members_only=True) is client.global_process_set


def check_removal(client: ronde.Client) -> None:
    """All ranks remove a set of one rank, the others by its number."""
    own = client.add_process_set([0], members_only=True) if client.rank == 0 else None
    number = int(client.broadcast(numpy.array([own.id if own is not None else 0]), 0)[0])
    assert client.remove_process_set(number if own is None else own)
    if own is not None:
        assert own.id is None
        check_sum(client, client.add_process_set([0], members_only=True))


def raises(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def check_refusals(client: ronde.Client) -> None:
    """What no rank can get is refused at once, and ranks that disagree by one name would fail together."""
    size, other = client.size, (client.rank + 1) % client.size
    refused = ronde.RefusedError
    raises(refused, "not among", lambda: client.add_process_set([other], members_only=True))
    raises(refused, "twice", lambda: client.add_process_set([client.rank] * 2, members_only=True))
    raises(refused, f"cannot have rank {size}", lambda: client.add_process_set([client.rank, size], members_only=True))
    client.barrier("refused")


def check_withdrawal(client: ronde.Client) -> None:
    """A rank that gives up fails the others; then they meet again."""
    pair = [0, client.size - 1]
    if client.rank not in pair:
        return
    if client.rank == 0:
        handle = client.add_process_set_async([*pair, 1], members_only=True)
        raises(TimeoutError, "still in flight", lambda: handle.wait(0.2))
        del handle
    elif client.size > 2:
        raises(ronde.RefusedError, "withdrawn", lambda: client.add_process_set([*pair, 1], members_only=True))
    check_sum(client, client.add_process_set(pair, members_only=True))


with ronde.connect() as client:
    check_members_alone(client)
    check_however_made(client)
    check_all_pairs(client)
    check_removal(client)
    check_refusals(client)
    check_withdrawal(client)
    client.barrier("end")
    print("members have formed their sets", flush=True)
