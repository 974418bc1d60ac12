"""Run by every rank of at least three: joins in process sets, with NumPy's results beside."""

from __future__ import annotations

import numpy

import ronde

TIMEOUT_S = 120.0


def value(rank: int, step: int) -> numpy.ndarray:
    """A rank's tensor in a step."""
    return numpy.arange(5.0) * (rank + 1) + step


def check_uneven_steps(client: ronde.Client, members: ronde.ProcessSet, rounds: int = 2) -> None:
    """The n-th rank of a set makes n steps; the others go on with zeros for it, and the last rank is the last to join.

    Operations have no name, so that their numbers have to restart together after each join.
    """
    for _ in range(rounds):
        steps = {rank: 1 + position for position, rank in enumerate(members.ranks)}
        for step in range(steps[client.rank]):
            active = [rank for rank in members.ranks if steps[rank] > step]
            total = sum(value(rank, step) for rank in active)
            found = client.allreduce(value(client.rank, step), op=ronde.Sum, process_set=members)
            numpy.testing.assert_array_equal(found, total)
            mean = client.allreduce(value(client.rank, step), process_set=members)
            numpy.testing.assert_allclose(mean, total / members.size(), rtol=1e-12)
            client.barrier(process_set=members)
        assert client.join(process_set=members) == members.ranks[-1]
        # All take part again, also in what zeros would change.
        most = client.allreduce(value(client.rank, 0), op=ronde.Max, process_set=members)
        numpy.testing.assert_array_equal(most, value(members.ranks[-1], 0))
        gathered = client.allgather(numpy.array([client.rank]), process_set=members)
        numpy.testing.assert_array_equal(gathered, members.ranks)


def check_large_tensors(client: ronde.Client, members: ronde.ProcessSet) -> None:
    """Tensors that are not sent along with their announcement, in a set of which only the first rank has not joined."""
    if client.rank == members.ranks[0]:
        tensor = numpy.random.default_rng(7).normal(size=70_001).astype(numpy.float32)
        found = client.allreduce(tensor, op=ronde.Sum, name="large", process_set=members)
        numpy.testing.assert_array_equal(found, tensor)
        adasum = client.allreduce(tensor, op=ronde.Adasum, name="large adasum", process_set=members)
        numpy.testing.assert_allclose(adasum, tensor, rtol=1e-6)  # that of a vector and zeros
    assert client.join(process_set=members) == members.ranks[0]


def check_other_sets(client: ronde.Client, members: ronde.ProcessSet, other: ronde.ProcessSet) -> None:
    """Ranks that have joined in one set do in others what zeros would change, and join there independently."""
    joining = [client.join_async(process_set=each) for each in (members,) if each.included()]
    everybody = client.allgather(numpy.array([client.rank]), "everybody")
    numpy.testing.assert_array_equal(everybody, numpy.arange(client.size))
    if other.included():
        most = client.allreduce(value(client.rank, 0), ronde.Max, "other", process_set=other)
        numpy.testing.assert_array_equal(most, value(other.ranks[-1], 0))
        assert client.join(process_set=other) in other.ranks
    for handle in joining:
        assert handle.wait(TIMEOUT_S) in members.ranks
    assert client.join() in range(client.size)


def check_refusals(client: ronde.Client, members: ronde.ProcessSet) -> None:
    """What needs the joined ranks fails in their set alone; the set stays while a rank has joined."""
    first, last = members.ranks[0], members.ranks[-1]
    pending = None
    if client.rank == last:
        pending = client.join_async(process_set=members)
        try:
            client.barrier(process_set=members)
        except ronde.RefusedError as error:
            assert f"rank {last} has joined; wait for the join first" in str(error), error
        else:
            raise AssertionError("a rank that has joined took part")
    try:
        client.remove_process_set(members)
    except ronde.RefusedError as error:
        assert f"cannot be removed: rank {last} has joined in it" in str(error), error
    else:
        raise AssertionError("a set with a joined rank was removed")
    client.broadcast(numpy.zeros(3), first, "all ranks")
    if members.included() and client.rank != last:
        for name, call in {
            "Allgather": lambda: client.allgather(numpy.zeros(3), "a", process_set=members),
            "Broadcast": lambda: client.broadcast(numpy.zeros(3), first, "b", process_set=members),
            "Allreduce with reduction min": lambda: client.allreduce(
                numpy.zeros(3), ronde.Min, "m", process_set=members
            ),
        }.items():
            try:
                call()
            except ronde.MismatchError as error:
                assert f"{name} is not supported with Join: rank {last} joined" in str(error), error
            else:
                raise AssertionError(f"{name} did without a rank")
        pending = client.join_async(process_set=members)
    if pending is not None:
        assert pending.wait(TIMEOUT_S) in members.ranks


def main() -> None:
    """Sets that all ranks add, and sets that their members form."""
    with ronde.connect() as client:
        size = client.size
        added = client.add_process_set(range(1, size))
        other = client.add_process_set([0, size - 1])
        if added.included():
            check_uneven_steps(client, added)
            check_large_tensors(client, added)
        check_other_sets(client, added, other)
        check_refusals(client, added)
        if client.rank < 2:
            pair = client.add_process_set([1, 0], members_only=True)
            check_uneven_steps(client, pair)
            check_large_tensors(client, pair)
        alone = client.add_process_set([client.rank], members_only=True)
        assert client.join(process_set=alone) == client.rank
        client.barrier("before the removal")
        assert client.remove_process_set(added)
        again = client.add_process_set(range(1, size))
        if again.included():
            check_uneven_steps(client, again)
        client.barrier("end")
        print(f"rank {client.rank} of {size}: joins of sets hold")


if __name__ == "__main__":
    main()
