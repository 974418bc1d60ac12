"""Run by every rank of at least two: rank 0 receives from any source, and the others send to it."""

from __future__ import annotations

import numpy

import ronde

ROUNDS = 20
TAG = 3


def message(rank: int, number: int) -> numpy.ndarray:
    """What a rank sends as its number-th message; the length differs, too."""
    return numpy.full(1 + number * 700, 100.0 * rank + number)


def check_all_arrive(client: ronde.Client) -> None:
    """Each message is received once, those of one source in order."""
    if client.rank > 0:
        for handle in [client.send_async(message(client.rank, number), 0, TAG) for number in range(ROUNDS)]:
            handle.wait()
        return
    expected = dict.fromkeys(range(1, client.size), 0)
    handles = [client.recv_async(None, TAG) for _ in range(ROUNDS * (client.size - 1))]
    for handle in handles:
        result = handle.wait()
        source = handle.source()
        numpy.testing.assert_array_equal(result, message(source, expected[source]))
        expected[source] += 1
    assert set(expected.values()) == {ROUNDS}, expected


def check_order_of_posting(client: ronde.Client) -> None:
    """Receives from the last rank and from any take messages in the order of the calls."""
    last = client.size - 1
    if client.rank == last:
        sent = [client.send_async(message(last, number), 0, TAG) for number in range(4)]
        client.barrier("sent")
        for handle in sent:
            handle.wait()
        return
    client.barrier("sent")
    if client.rank > 0:
        return
    posted = [client.recv_async(source, TAG) for source in (last, None, last, None)]
    for number in (3, 0, 2, 1):
        numpy.testing.assert_array_equal(posted[number].wait(), message(last, number))
        assert posted[number].source() == last


def check_process_sets(client: ronde.Client) -> None:
    """A process set has separate messages."""
    pair = client.add_process_set([0, 1]) if client.size > 2 else None
    if client.rank == 0:
        handle = client.recv_async(None, TAG, process_set=pair)
        numpy.testing.assert_array_equal(handle.wait(), message(1, 2))
        assert handle.source() == 1
        client.allreduce(numpy.ones(1), name="alone")
    else:
        if client.rank == 1:
            client.send(message(1, 2), 0, TAG, process_set=pair)
        client.allreduce(numpy.ones(1), name="alone")


def main() -> None:
    """Runs all checks on one session."""
    with ronde.connect() as client:
        check_all_arrive(client)
        check_order_of_posting(client)
        client.barrier("between")
        check_all_arrive(client)
        check_process_sets(client)
        client.barrier("end")
        print(f"rank {client.rank}: messages came from any source", flush=True)


if __name__ == "__main__":
    main()
