"""Shows each collective: every worker's input and result, in a table.

ronde run -np 4 python sdk-python/examples/collectives.py
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

import ronde


def examples(client: ronde.Client) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """Yields the source of a call, this worker's tensor, and the call."""
    me, size = client.rank, client.size
    next_rank, previous_rank = (me + 1) % size, (me - 1) % size
    mine = np.array([me + 1, 10 * me])
    rows = np.arange(size + 1) + 10 * me
    uneven = np.full(me, me)
    splits = [1] * me + [0] * (size - me)

    def exchange(tensor: Any) -> Any:
        """Sends around a ring. The message is in flight while this worker waits for the other one."""
        sent = client.send_async(tensor, next_rank)
        received = client.recv(previous_rank)
        sent.wait()
        return received

    alone = [] if size == 1 else [("send to the next, recv from the last", mine, exchange)]
    return [
        ("allreduce(x)", mine, client.allreduce),
        ("allreduce(x, op=Max)", mine, lambda x: client.allreduce(x, op=ronde.Max)),
        ("allreduce(x, op=Median)", mine / 2, lambda x: client.allreduce(x, op=ronde.Median)),
        ("grouped_allreduce([x, y], op=Sum)", [mine, rows[:1]], lambda x: client.grouped_allreduce(x, op=ronde.Sum)),
        ("reduce(x, root_rank=0, op=Sum)", mine, lambda x: client.reduce(x, 0, op=ronde.Sum)),
        ("reduce_scatter(x, op=Sum)", rows, lambda x: client.reduce_scatter(x, op=ronde.Sum)),
        ("broadcast(x, root_rank=0)", mine, lambda x: client.broadcast(x, 0)),
        ("scatter(x, root_rank=0)", rows if me == 0 else None, lambda x: client.scatter(x, 0)),
        ("gather(x, root_rank=0)", uneven, lambda x: client.gather(x, 0)),
        ("allgather(x)", uneven, client.allgather),
        ("alltoall(x)", np.arange(size) + 10 * me, client.alltoall),
        ("alltoall(x, splits)", (uneven, splits), lambda x: client.alltoall(*x)),
        *alone,
    ]


def main() -> None:
    """Performs one call after the other. Rank 0 collects the results of all ranks."""
    with ronde.connect() as client:
        for call, mine, perform in examples(client):
            report(client, call, mine, perform(mine))
        pair = client.add_process_set(range(min(2, client.size)))
        mine = np.array([client.rank])
        result = client.allgather(mine, process_set=pair) if pair.included() else "not in the set"
        report(client, f"allgather(x, process_set=add_process_set({pair.ranks}))", mine, result)
        client.barrier()
        report(client, "join()", "no tensors left", f"rank {client.join()} was the last")


def report(client: ronde.Client, call: str, mine: Any, result: Any) -> None:
    """Prints a table at rank 0, to which the others send their lines as bytes."""
    line = f"  rank {client.rank}   {text(mine):24} -> {text(result)}\n"
    lines = client.gather(np.frombuffer(line.encode(), np.uint8), root_rank=0)
    if client.rank == 0:
        print(f"{call}\n{lines.tobytes().decode()}", flush=True)


def text(value: Any) -> str:
    """Formats one tensor, several, or None on one line."""
    if isinstance(value, (list, tuple)):
        return ", ".join(text(each) for each in value)
    return "-" if value is None else str(value)


if __name__ == "__main__":
    main()
