"""Every collective of ronde.jax, eagerly and compiled, against NumPy on all ranks' inputs, which each rank knows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy
import ronde.jax as hvd

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = [(), (1,), (7,), (3, 5), (0, 4), (40_000,)]
SMALL_INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
FLOATS = ["float16", "bfloat16", "float32"]
checked = 0


def inputs(shape: tuple[int, ...], dtype: str, ranks: int, seed: int = 0) -> list[Any]:
    """Small integers: their sums and products are exact in every type."""
    made = []
    for rank in range(ranks):
        values = numpy.random.default_rng([seed, rank, len(shape)]).integers(1, 4, shape)
        if dtype == "bool":
            values = values == 1
        made.append(jnp.asarray(values).astype(dtype))
    return made


def check(found: Any, expected: Any, what: str) -> None:
    global checked  # noqa: PLW0603
    checked += 1
    mine, other = numpy.asarray(found), numpy.asarray(expected)
    assert mine.dtype == other.dtype, f"{what}: {mine.dtype}, not {other.dtype}"
    assert mine.shape == other.shape, f"{what}: {mine.shape}, not {other.shape}"
    assert (mine == other).all(), f"{what}: {mine}, not {other}"


def both(what: str, call: Callable[[Any], Any], tensor: Any, expected: Any) -> None:
    """Checks a call outside of a program and in one."""
    check(call(tensor), expected, f"{what}, eager")
    check(jax.jit(call)(tensor), expected, f"{what}, compiled")


def reduced(tensors: list[Any], op: int) -> Any:
    """NumPy's result in the type of the inputs."""
    wide = numpy.stack([numpy.asarray(tensor).astype(numpy.float64) for tensor in tensors])
    by = {hvd.Sum: "sum", hvd.Min: "min", hvd.Max: "max", hvd.Product: "prod"}
    if tensors[0].dtype == jnp.bool_:
        by.update({hvd.Sum: "max", hvd.Product: "min"})
    result = wide.mean(0) if op == hvd.Average else getattr(wide, by[op])(0)
    if op == hvd.Average and jnp.issubdtype(tensors[0].dtype, jnp.integer):
        result = numpy.trunc(result)
    return jnp.asarray(result).astype(tensors[0].dtype)


def reductions(rank: int, size: int) -> None:
    names = {hvd.Average: "average", hvd.Sum: "sum", hvd.Min: "min", hvd.Max: "max", hvd.Product: "product"}
    for dtype in [*SMALL_INTEGERS, *FLOATS, "bool"]:
        ops = [op for op in names if (op, dtype) != (hvd.Average, "bool")]
        if dtype == "uint32":
            ops = [hvd.Sum, hvd.Product]
        if dtype in FLOATS and size & (size - 1):
            ops.remove(hvd.Average)  # thirds are rounded; they have a test of their own
        for shape in SHAPES if dtype in ("float32", "bfloat16", "int32") else [(3, 5)]:
            tensors = inputs(shape, dtype, size)
            for op in ops:
                what = f"{names[op]} of {dtype}{list(shape)}"
                both(what, lambda x, op=op: hvd.allreduce(x, op), tensors[rank], reduced(tensors, op))
    tensors = inputs((6,), "int32", size)
    bits = {hvd.BitAnd: numpy.bitwise_and, hvd.BitOr: numpy.bitwise_or, hvd.BitXor: numpy.bitwise_xor}
    for op, function in bits.items():
        both(
            "bits",
            lambda x, op=op: hvd.allreduce(x, op),
            tensors[rank],
            function.reduce([*map(numpy.asarray, tensors)]),
        )


def scales_and_complex(rank: int, size: int) -> None:
    tensors = inputs((4, 3), "float32", size)
    total = reduced(tensors, hvd.Sum)
    scaled = lambda x: hvd.allreduce(x, hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)  # noqa: E731
    both("scales", scaled, tensors[rank], 2 * total)
    both("codec", lambda x: hvd.allreduce(x, hvd.Sum, codec="bfloat16"), tensors[rank], total)
    for shape in [(), (2, 3), (0,)]:
        waves = [
            (a + 1j * b).astype("complex64")
            for a, b in zip(inputs(shape, "float32", size), inputs(shape, "float32", size, 1))
        ]
        both("complex", lambda x: hvd.allreduce(x, hvd.Sum), waves[rank], sum(waves[1:], waves[0]))
        both("complex", lambda x: hvd.broadcast(x, size - 1), waves[rank], waves[size - 1])
    thirds = inputs((5,), "float32", size)
    mean = numpy.asarray(hvd.allreduce(thirds[rank]))
    assert numpy.allclose(mean, numpy.asarray(reduced(thirds, hvd.Sum)) / size, rtol=1e-6)
    check(jax.jit(hvd.allreduce)(thirds[rank]), mean, "average, the same bits")
    adasum = numpy.asarray(hvd.allreduce(thirds[rank], hvd.Adasum))
    check(jax.jit(lambda x: hvd.allreduce(x, hvd.Adasum))(thirds[rank]), adasum, "Adasum, the same bits")
    assert not (adasum == mean).all()


def groups(rank: int, size: int) -> None:
    trees = [
        {
            "a": inputs((3,), "float32", size, 5)[each],
            "b": [inputs((2, 2), "bfloat16", size, 6)[each]],
            "c": inputs((), "int32", size)[each],
        }
        for each in range(size)
    ]
    for call in (lambda t: hvd.grouped_allreduce(t, hvd.Sum), jax.jit(lambda t: hvd.grouped_allreduce(t, hvd.Sum))):
        found = call(trees[rank])
        assert jax.tree.structure(found) == jax.tree.structure(trees[rank])
        expected = [reduced([jax.tree.leaves(tree)[leaf] for tree in trees], hvd.Sum) for leaf in range(3)]
        for mine, other in zip(jax.tree.leaves(found), expected):
            check(mine, other, "group")
    assert hvd.grouped_allreduce({}) == {}


def rows(rank: int, size: int) -> None:
    for dtype in ["float32", "bfloat16", "uint32", "bool", "float8_e4m3fn", "complex64"]:
        tensors = inputs((2, 3), dtype, size)
        both(f"allgather of {dtype}", hvd.allgather, tensors[rank], numpy.concatenate([*map(numpy.asarray, tensors)]))
        both(f"broadcast of {dtype}", lambda x: hvd.broadcast(x, size - 1), tensors[rank], tensors[size - 1])
    counts = [each + (each > 0) for each in range(size)]  # none on rank 0
    ragged = [inputs((counts[each], 2), "float32", size, 7)[each] for each in range(size)]
    whole = numpy.concatenate([*map(numpy.asarray, ragged)])
    check(hvd.allgather(ragged[rank]), whole, "ragged, eager")
    both("ragged", lambda x: hvd.allgather(x, rows=counts), ragged[rank], whole)
    tensors = inputs((2 * size, 3), "float32", size, 8)
    exchanged = numpy.concatenate([numpy.asarray(tensor)[2 * rank : 2 * rank + 2] for tensor in tensors])
    both("alltoall", hvd.alltoall, tensors[rank], exchanged)
    # Rank r sends r + s rows to rank s.
    tables = [inputs((sum(r + s for s in range(size)), 2), "float32", size, 9)[r] for r in range(size)]
    splits, received = [rank + s for s in range(size)], [r + rank for r in range(size)]
    starts = [sum(r + s for s in range(rank)) for r in range(size)]
    expected = numpy.concatenate([numpy.asarray(t)[start : start + n] for t, start, n in zip(tables, starts, received)])
    result, counted = hvd.alltoall(tables[rank], splits)
    check(result, expected, "alltoall with splits, eager")
    check(counted, numpy.asarray(received, "int32"), "received splits")
    both("alltoall with splits", lambda x: hvd.alltoall(x, splits, received_splits=received)[0], tables[rank], expected)
    for height in (size, size + 1, 1):
        tensors = inputs((height, 2), "float32", size, 10)
        each, more = divmod(height, size)
        start = rank * each + min(rank, more)
        mine = numpy.asarray(reduced(tensors, hvd.Sum))[start : start + each + (rank < more)]
        both("reducescatter", lambda x: hvd.reducescatter(x, hvd.Sum), tensors[rank], mine)


def sets(rank: int, size: int) -> None:
    first = hvd.add_process_set([0])
    pair = hvd.add_process_set([0, 1]) if size > 2 else hvd.client().global_process_set
    if rank < 2:
        tensors = inputs((3,), "float32", size, 11)
        both("set", lambda x: hvd.allreduce(x, hvd.Sum, process_set=pair), tensors[rank], tensors[0] + tensors[1])
        both("set", lambda x: hvd.allgather(x, process_set=pair), tensors[rank], numpy.concatenate(tensors[:2]))
        both("set", lambda x: hvd.broadcast(x, 1, process_set=pair), tensors[rank], tensors[1])
    if rank == 0:
        both("set of one", lambda x: hvd.allreduce(x, process_set=first), jnp.ones(2), numpy.ones(2, "float32"))
    else:
        try:
            hvd.allreduce(jnp.ones(2), process_set=first)
        except ValueError as error:
            assert "not a member" in str(error), error
        else:
            raise AssertionError("a rank that is not in the set took part")
    hvd.barrier()
    jax.jit(hvd.barrier)()
    jax.effects_barrier()
    hvd.remove_process_set(first)


def main() -> None:
    hvd.init()
    hvd.init()  # does nothing
    rank, size = hvd.rank(), hvd.size()
    assert (hvd.local_size() <= size, hvd.is_initialized(), hvd.max_size()) == (True, True, size)
    for part in (reductions, scales_and_complex, groups, rows, sets):
        part(rank, size)
    print(f"rank {rank} of {size}: {checked} checks passed", flush=True)
    hvd.shutdown()
    assert not hvd.is_initialized()


if __name__ == "__main__":
    sys.exit(main())
