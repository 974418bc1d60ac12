"""Run by every rank: shipped plugins as codecs and reductions, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy

import ronde

SHAPES = [(1,), (7,), (3, 5), (300_000,)]


def contribution(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Different on each rank."""
    return numpy.random.default_rng([rank, len(shape), *shape]).normal(size=shape).astype(dtype)


def all_of(client: ronde.Client, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Every rank's contribution, stacked."""
    return numpy.stack([contribution(rank, shape, dtype) for rank in range(client.size)])


def check_same_bits(client: ronde.Client, result: Any) -> None:
    """All ranks have the same bytes."""
    bits = numpy.frombuffer(numpy.ascontiguousarray(result).tobytes(), numpy.uint8)
    rows = client.allgather(bits.reshape(1, -1))
    assert (rows == rows[0]).all(), "ranks have different bits"


def check_bf16(client: ronde.Client) -> None:
    """A sum whose addends and result are each rounded to eight bits at most."""
    for shape in SHAPES:
        given = all_of(client, shape).astype(numpy.float64)
        result = client.allreduce(contribution(client.rank, shape), ronde.Sum, codec=ronde.Plugin("bf16"))
        bound = 2.0**-8 * (numpy.abs(given).sum(axis=0) + numpy.abs(given.sum(axis=0))) * 1.01 + 1e-6
        assert (numpy.abs(result - given.sum(axis=0)) <= bound).all()
        check_same_bits(client, result)
    parts = [contribution(client.rank, shape) for shape in SHAPES]
    alone = [client.allreduce(part, codec=ronde.Plugin("bf16")) for part in parts]
    group = client.grouped_allreduce(parts, codec=ronde.Plugin("bf16"), out=parts)
    for one, other, part in zip(alone, group, parts):
        assert other is part
        numpy.testing.assert_array_equal(one, other)


def check_median(client: ronde.Client) -> None:
    """The reduction of a plugin is NumPy's, and the native one's bit by bit."""
    for dtype in ("float16", "float32", "float64"):
        for shape in SHAPES:
            mine, given = contribution(client.rank, shape, dtype), all_of(client, shape, dtype)
            result = client.allreduce(mine, ronde.PluginOp("median"))
            tolerance = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-15}[dtype]
            numpy.testing.assert_allclose(result, numpy.median(given.astype(numpy.float64), axis=0), tolerance, 1e-3)
            check_same_bits(client, result)
            native = client.allreduce(mine, ronde.Median)
            numpy.testing.assert_array_equal(result, native)


def check_a_set(client: ronde.Client) -> None:
    """Process sets have separate plugin state."""
    if client.size < 3:
        return
    some = client.add_process_set([0, client.size - 1])
    if some.included():
        given = all_of(client, (50,))[[0, client.size - 1]]
        result = client.allreduce(contribution(client.rank, (50,)), ronde.PluginOp("median"), process_set=some)
        numpy.testing.assert_allclose(result, numpy.median(given, axis=0), rtol=1e-6)
    client.remove_process_set(some)


def check_residuals(client: ronde.Client) -> None:
    """Top-k sends residuals later: after enough steps the sum is exact, because the numbers are integers."""
    elements = 1_000
    mine = numpy.random.default_rng(client.rank).integers(1, 100, elements).astype(numpy.float32)
    wanted = sum(numpy.random.default_rng(rank).integers(1, 100, elements) for rank in range(client.size))
    codec = ronde.Plugin("topk", ratio=0.25)
    total, first = numpy.zeros(elements, numpy.float32), None
    for _ in range(16):
        step = client.allreduce(mine, ronde.Sum, "residual", codec=codec)
        check_same_bits(client, step)
        first = step.copy() if first is None else first
        total += step
        mine = numpy.zeros_like(mine)
    numpy.testing.assert_array_equal(total, wanted)
    assert first is not None
    is_sent_between_sidecars = client.cross_size > 1
    assert not is_sent_between_sidecars or numpy.count_nonzero(first) <= elements // 2, "nothing was left out"
    # Another name has no residual, and neither has the same one in a sum without the codec.
    zeros = numpy.zeros(elements, numpy.float32)
    assert not client.allreduce(zeros, ronde.Sum, "another", codec=codec).any()
    assert not client.allreduce(zeros, ronde.Sum, "residual").any()


def main() -> None:
    """All of it."""
    with ronde.connect() as client:
        check_bf16(client)
        check_median(client)
        check_a_set(client)
        check_residuals(client)
        client.barrier()
        print(f"rank {client.rank}: plugins give the expected results", flush=True)


if __name__ == "__main__":
    main()
