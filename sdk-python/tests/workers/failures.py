"""Run by every rank: failures reach every rank, and the job continues."""

from __future__ import annotations

import numpy

import ronde


def expect(
    kind: type[ronde.RondeError], client: ronde.Client, mine: numpy.ndarray, name: str, **options: object
) -> str:
    """Submits something on which ranks disagree; returns the reason, which all ranks get."""
    try:
        client.allreduce(mine, name=name, **options)  # type: ignore[arg-type]
    except kind as error:
        assert error.tensor == f"allreduce.{name}", error.tensor
        assert error.blame == "caller", error.blame
        return str(error)
    raise AssertionError(f"{name} went well")


def check_dropped_group_and_message(client: ronde.Client, odd: bool) -> None:
    """Dropping an operation in flight fails it on all ranks that take part, and no other operation."""
    tensors, last = [numpy.zeros(2), numpy.ones(3)], client.size - 1
    if odd:
        group, message = client.grouped_allreduce_async(tensors, name="group"), client.send_async(tensors[0], 0)
        assert not group.poll()
        assert not message.poll()
        del group, message
    client.barrier("dropped")
    calls = [] if odd else [lambda: client.grouped_allreduce(tensors, name="group")]
    if client.rank == 0:
        calls.append(lambda: client.recv(last))
    for call in calls:
        try:
            call()
        except ronde.RefusedError as error:
            assert error.rank == last, error.rank
        else:
            raise AssertionError("what another rank dropped went well")
    # The next ones of the same names work.
    sent = client.send_async(tensors[1], 0) if odd else None
    for result, tensor in zip(client.grouped_allreduce(tensors, ronde.Sum, "group"), tensors):
        numpy.testing.assert_array_equal(result, client.size * tensor)
    if client.rank == 0:
        numpy.testing.assert_array_equal(client.recv(last), tensors[1])
    if sent is not None:
        sent.wait()


def main() -> None:
    """Disagreements about shape, type and reduction; a request that is dropped; what Python's side refuses."""
    with ronde.connect() as client:
        odd = client.rank == client.size - 1
        reasons = [
            expect(ronde.MismatchError, client, numpy.zeros(3 if odd else 2, numpy.float32), "shape"),
            expect(ronde.MismatchError, client, numpy.zeros(2, numpy.float64 if odd else numpy.float32), "type"),
            expect(ronde.MismatchError, client, numpy.zeros(2), "op", op=ronde.Sum if odd else ronde.Max),
        ]
        # The same reason on all ranks.
        text = numpy.frombuffer("|".join(reasons).encode(), dtype=numpy.uint8)
        everybody = client.allgather(text).reshape(client.size, -1)
        assert (everybody == everybody[0]).all()

        # A rank that gives up fails the operation for those who wait.
        if odd:
            handle = client.allreduce_async(numpy.zeros(2), name="given up")
            del handle
            client.barrier("given up")
        else:
            client.barrier("given up")
            assert "given up" in expect(ronde.RefusedError, client, numpy.zeros(2), "given up")

        check_dropped_group_and_message(client, odd)

        for wrong in (numpy.zeros(2, numpy.complex64), [1.0, 2.0], "text"):
            try:
                client.allreduce(wrong)
            except ValueError:
                continue
            raise AssertionError(f"{wrong!r} was accepted")

        numpy.testing.assert_array_equal(client.allreduce(numpy.ones(4), op=ronde.Sum, name="on"), client.size)
        client.barrier()
        print(f"rank {client.rank}: failures reached every rank", flush=True)
        client.barrier("end")


if __name__ == "__main__":
    main()
