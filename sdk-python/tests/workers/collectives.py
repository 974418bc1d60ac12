"""Run by every rank: all types and reductions against NumPy, uneven gathers, broadcasts, any order."""

from __future__ import annotations

import random

import numpy

import ronde

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (4, 0, 2), (1021,), (300_000,)]
OPS = {"Average": ronde.Average, "Sum": ronde.Sum, "Min": ronde.Min, "Max": ronde.Max, "Product": ronde.Product}


def contribution(rank: int, shape: tuple[int, ...], dtype: str) -> numpy.ndarray:
    """Small whole numbers, so that sums and products are exact in every type."""
    values = numpy.random.default_rng([rank, len(shape)]).integers(1, 4, size=shape)
    return numpy.asarray(values).astype(dtype)


def expected(op: str, tensors: list[numpy.ndarray]) -> numpy.ndarray:
    """What NumPy makes of all ranks' tensors, in their type."""
    stacked = numpy.stack(tensors)
    wide = stacked.astype(numpy.float64 if stacked.dtype.kind == "f" else numpy.int64)
    if op == "Average":
        total = wide.sum(axis=0)
        return (total / len(tensors) if stacked.dtype.kind == "f" else total // len(tensors)).astype(stacked.dtype)
    reduce = {"Sum": numpy.add, "Min": numpy.minimum, "Max": numpy.maximum, "Product": numpy.multiply}[op]
    return reduce.reduce(wide, axis=0).astype(stacked.dtype)


def check_reductions(client: ronde.Client) -> None:
    """Every type, shape and reduction, submitted by each rank in an order of its own."""
    cases = [(dtype, shape, op) for dtype in DTYPES for shape in SHAPES for op in OPS]
    random.Random(client.rank).shuffle(cases)
    handles = {}
    for dtype, shape, op in cases:
        name = f"{dtype}.{shape}.{op}"
        handles[dtype, shape, op] = client.allreduce_async(
            contribution(client.rank, shape, dtype), op=OPS[op], name=name
        )
    for (dtype, shape, op), handle in handles.items():
        result = handle.wait()
        want = expected(op, [contribution(rank, shape, dtype) for rank in range(client.size)])
        assert result.dtype == want.dtype, (dtype, result.dtype)
        assert result.shape == want.shape, (shape, result.shape)
        numpy.testing.assert_allclose(
            result.astype(float), want.astype(float), rtol=2e-3 if dtype == "float16" else 1e-6, err_msg=f"{dtype} {op}"
        )


def check_scaling(client: ronde.Client) -> None:
    """Factors before and after the reduction."""
    mine = numpy.full(10, float(client.rank + 1))
    total = sum(range(1, client.size + 1))
    result = client.allreduce(mine, op=ronde.Sum, prescale_factor=0.5, postscale_factor=4.0)
    numpy.testing.assert_allclose(result, 2.0 * total)


def check_gathers(client: ronde.Client) -> None:
    """First dimensions differ, also by nothing at all."""
    for columns in ((), (3,)):
        tensors = [numpy.full((rank * 2 % 5, *columns), rank, dtype=numpy.int32) for rank in range(client.size)]
        result = client.allgather(tensors[client.rank], name=f"uneven{len(columns)}")
        numpy.testing.assert_array_equal(result, numpy.concatenate(tensors))
    numpy.testing.assert_array_equal(
        client.allgather(numpy.array([client.rank % 2 == 0])), [rank % 2 == 0 for rank in range(client.size)]
    )


def check_broadcasts(client: ronde.Client) -> None:
    """From every root, into new memory and into one's own."""
    for root in range(client.size):
        for dtype in [*DTYPES, "bool"]:
            mine = contribution(client.rank, (5, 2), "int64").astype(dtype) if dtype != "bool" else numpy.ones(3, bool)
            if dtype == "bool" and client.rank != root:
                mine = numpy.zeros(3, bool)
            want = contribution(root, (5, 2), "int64").astype(dtype) if dtype != "bool" else numpy.ones(3, bool)
            numpy.testing.assert_array_equal(client.broadcast(mine, root), want)
            out = numpy.zeros_like(mine)
            assert client.broadcast(mine, root, out=out) is out
            numpy.testing.assert_array_equal(out, want)


def main() -> None:
    """Runs all checks on one session."""
    with ronde.connect() as client:
        check_reductions(client)
        check_scaling(client)
        check_gathers(client)
        check_broadcasts(client)
        client.barrier()
        print(f"rank {client.rank} of {client.size}: collectives agree with NumPy", flush=True)
        client.barrier("end")


if __name__ == "__main__":
    main()
