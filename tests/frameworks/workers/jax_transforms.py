"""Gradients and other transformations through collectives, against one process that computes all ranks' losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy
import ronde.jax as hvd

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 6, 3


def data(rank: int, rows: int = ROWS) -> Any:
    values = numpy.random.default_rng(rank).normal(size=(rows, COLUMNS))
    return jnp.asarray(values, jnp.float32)


def weight(rank: int, rows: int) -> Any:
    """What each rank multiplies its result with, so that ranks' gradients differ."""
    return jnp.asarray(numpy.random.default_rng(100 + rank).normal(size=(rows, COLUMNS)), jnp.float32)


def close(found: Any, expected: Any, what: str) -> None:
    mine, other = numpy.asarray(found), numpy.asarray(expected)
    assert mine.shape == other.shape, f"{what}: {mine.shape}, not {other.shape}"
    assert numpy.allclose(mine, other, rtol=2e-4, atol=2e-5), f"{what}: {mine}, not {other}"


def loss(result: Any, rank: int) -> Any:
    """A loss with curvature. `jnp.sin` before the collective gives the chain rule something to do."""
    return jnp.sum(weight(rank, result.shape[0]) * result**2)


def cases(rank: int, size: int) -> dict[str, tuple[Callable[[Any], Any], Any, int]]:
    """For each collective: its call here, what each rank gets from all ranks' inputs, and the number of rows."""

    def same(make: Callable[[Any], Any]) -> Any:
        return lambda inputs: [make(inputs)] * size

    def cut(inputs: Any, counts: Any) -> list[Any]:
        ends = numpy.cumsum([0, *counts])
        return [inputs[ends[each] : ends[each + 1]] for each in range(size)]

    def shares(rows: int) -> list[int]:
        return [rows // size + (each < rows % size) for each in range(size)]

    def exchange(inputs: Any) -> list[Any]:
        pieces = [cut(each, [ROWS // size] * size) for each in inputs]
        return [jnp.concatenate([pieces[source][target] for source in range(size)]) for target in range(size)]

    splits = [[1 + (source + target) % 2 for target in range(size)] for source in range(size)]

    def uneven(inputs: Any) -> list[Any]:
        pieces = [cut(inputs[source][: sum(splits[source])], splits[source]) for source in range(size)]
        return [jnp.concatenate([pieces[source][target] for source in range(size)]) for target in range(size)]

    received = [splits[source][rank] for source in range(size)]
    counts = [each + 1 for each in range(size)]

    def ragged(inputs: Any) -> list[Any]:
        return [jnp.concatenate([each[:count] for each, count in zip(inputs, counts)])] * size

    return {
        "sum": (lambda x: hvd.allreduce(x, hvd.Sum), same(sum), ROWS),
        "average": (hvd.allreduce, same(lambda xs: sum(xs) / size), ROWS),
        "scaled": (
            lambda x: hvd.allreduce(x, hvd.Average, prescale_factor=3.0, postscale_factor=0.5),
            same(lambda xs: 1.5 * sum(xs) / size),
            ROWS,
        ),
        "broadcast": (lambda x: hvd.broadcast(x, size - 1), same(lambda xs: xs[size - 1]), ROWS),
        "allgather": (hvd.allgather, same(jnp.concatenate), ROWS),
        "allgather, ragged": (lambda x: hvd.allgather(x[: counts[rank]], rows=counts), ragged, ROWS),
        "alltoall": (hvd.alltoall, exchange, ROWS),
        "alltoall, splits": (
            lambda x: hvd.alltoall(x[: sum(splits[rank])], splits[rank], received_splits=received)[0],
            uneven,
            ROWS,
        ),
        "reducescatter": (lambda x: hvd.reducescatter(x, hvd.Sum), lambda xs: cut(sum(xs), shares(ROWS)), ROWS),
        "reducescatter, uneven": (
            lambda x: hvd.reducescatter(x, hvd.Average),
            lambda xs: cut(sum(xs) / size, shares(ROWS + 1)),
            ROWS + 1,
        ),
    }


def gradients(rank: int, size: int) -> None:
    for what, (call, reference, rows) in cases(rank, size).items():
        inputs = [data(each, rows) for each in range(size)]

        def mine(x: Any, call: Any = call) -> Any:
            return loss(call(jnp.sin(x)), rank)

        def everybodys(xs: Any, reference: Any = reference) -> Any:
            results = reference([jnp.sin(x) for x in xs])
            return sum(loss(result, each) for each, result in enumerate(results))

        expected = jax.grad(everybodys)(inputs)[rank]
        close(jax.grad(mine)(inputs[rank]), expected, f"gradient of {what}")
        close(jax.jit(jax.grad(mine))(inputs[rank]), expected, f"compiled gradient of {what}")
        close(jax.jit(jax.grad(jax.checkpoint(mine)))(inputs[rank]), expected, f"gradient of {what} with checkpoint")
        # Forward mode: the derivative along all ranks' directions.
        _, tangent = jax.jit(lambda x, call=call: jax.jvp(call, (x,), (jnp.cos(x),)))(inputs[rank])
        _, known = jax.jvp(reference, (inputs,), ([jnp.cos(x) for x in inputs],))
        close(tangent, known[rank], f"tangent of {what}")


def second_order(rank: int, size: int) -> None:
    inputs = [data(each, 2) for each in range(size)]
    curve = jax.jit(
        jax.grad(lambda x: jnp.sum(jax.grad(lambda y: loss(hvd.allreduce(jnp.sin(y), hvd.Sum), 0))(x) ** 2))
    )

    def everybodys(xs: Any) -> Any:
        inner = jax.grad(lambda ys: size * loss(sum(jnp.sin(y) for y in ys), 0))
        return sum(jnp.sum(each**2) for each in inner(xs))

    close(curve(inputs[rank]), jax.grad(everybodys)(inputs)[rank], "second order")


def batches(rank: int, size: int) -> None:
    """A batch of a collective is the collective of each element."""
    for what, (call, reference, rows) in cases(rank, size).items():
        batch = [jnp.stack([data(each + 10 * b, rows) for b in range(4)]) for each in range(size)]
        expected = jnp.stack([reference([tensor[b] for tensor in batch])[rank] for b in range(4)])
        close(jax.vmap(call)(batch[rank]), expected, f"vmap of {what}")
        close(jax.jit(jax.vmap(call))(batch[rank]), expected, f"compiled vmap of {what}")
        last = jnp.moveaxis(batch[rank], 0, -1)
        close(jax.vmap(call, in_axes=-1)(last), expected, f"vmap of {what} along the last axis")
        close(jax.vmap(jax.jit(call))(batch[rank]), expected, f"vmap of compiled {what}")
    try:
        jax.vmap(lambda x: hvd.allreduce(x, hvd.Adasum))(jnp.ones((2, 3)))
    except NotImplementedError as error:
        assert "jax.lax.map" in str(error)
    else:
        raise AssertionError("a batch of Adasum was one Adasum")
    for op in (hvd.Max, hvd.Product):
        try:
            jax.jit(jax.grad(lambda x, op=op: jnp.sum(hvd.allreduce(x, op))))(jnp.ones(3))
        except NotImplementedError as error:
            assert "Sum and Average" in str(error)
        else:
            raise AssertionError("Max has a gradient")


def control_flow(rank: int, size: int) -> None:
    inputs = [data(each) for each in range(size)]

    def steps(x: Any) -> Any:
        def body(carry: Any, factor: Any) -> tuple[Any, Any]:
            carry = hvd.allreduce(jnp.sin(carry) * factor)
            return carry, hvd.allreduce(jnp.sum(carry), hvd.Max)

        last, maxima = jax.lax.scan(body, x, jnp.arange(1.0, 4.0))
        return last, maxima

    expected = inputs
    known = []
    for factor in (1.0, 2.0, 3.0):
        expected = [sum(jnp.sin(each) * factor for each in expected) / size] * size
        known.append(jnp.sum(expected[0]))
    last, maxima = jax.jit(steps)(inputs[rank])
    close(last, expected[0], "scan")
    close(maxima, jnp.stack(known), "results of scan")
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: hvd.allreduce(c, hvd.Sum), x))
    close(loop(inputs[rank]), sum(inputs) * size**2, "loop")
    branch = jax.jit(lambda c, x: jax.lax.cond(c, lambda y: hvd.allreduce(y, hvd.Sum), lambda y: y, x))
    close(branch(True, inputs[rank]), sum(inputs), "branch with a collective")
    close(branch(False, inputs[rank]), inputs[rank], "branch without")
    count = jax.jit(lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: hvd.allreduce(c, hvd.Sum), x))
    result = numpy.asarray(count(jnp.ones(1)))
    assert 100 <= result[0] < 100 * size, result


def main() -> None:
    hvd.init()
    for part in (gradients, second_order, batches, control_flow):
        part(hvd.rank(), hvd.size())
        print(f"rank {hvd.rank()} of {hvd.size()}: {part.__name__} passed", flush=True)


if __name__ == "__main__":
    main()
