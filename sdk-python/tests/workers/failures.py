"""Run by every rank: what goes wrong is told to everybody, and the job goes on."""

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

        for wrong in (numpy.zeros(2, numpy.complex64), [1.0, 2.0], "text"):
            try:
                client.allreduce(wrong)
            except ValueError:
                continue
            raise AssertionError(f"{wrong!r} was accepted")

        numpy.testing.assert_array_equal(client.allreduce(numpy.ones(4), op=ronde.Sum, name="on"), client.size)
        client.barrier()
        print(f"rank {client.rank}: failures were told to everybody", flush=True)
        client.barrier("end")


if __name__ == "__main__":
    main()
