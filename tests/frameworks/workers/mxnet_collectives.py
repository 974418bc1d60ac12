"""Collectives of ronde.mxnet on MXNet's two kinds of arrays, against NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import mxnet as mx
import numpy as np
import ronde.mxnet as hvd

TYPES = ["float32", "float64", "float16", "int32", "int64", "uint8", "int8"]
SHAPES = [(1,), (7,), (3, 4), (0, 5), (2, 3, 4)]


def value(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """What a rank contributes: small whole numbers, whose products over three ranks are exact in all types."""
    return (np.arange(int(np.prod(shape))).reshape(shape) % 3 + rank + 1).astype(dtype)


def everybodys(shape: tuple[int, ...], dtype: str) -> list[np.ndarray[Any, Any]]:
    return [value(rank, shape, dtype) for rank in range(hvd.size())]


def classic(array: np.ndarray[Any, Any]) -> Any:
    return mx.nd.array(array, dtype=array.dtype)


def newer(array: np.ndarray[Any, Any]) -> Any:
    return mx.np.array(array, dtype=array.dtype)


KINDS = (classic, newer)


def check(found: Any, expected: Any, like: Any) -> None:
    assert type(found) is type(like), (type(found), type(like))
    assert found.shape == np.shape(expected), (found.shape, np.shape(expected))
    assert np.dtype(found.dtype) == np.dtype(like.dtype), (found.dtype, like.dtype)
    assert np.array_equal(found.asnumpy(), expected), (found, expected)


def reductions() -> None:
    for make in KINDS:
        for dtype in TYPES:
            for shape in SHAPES:
                mine, stacked = make(value(hvd.rank(), shape, dtype)), np.stack(everybodys(shape, dtype))
                for op, expected in [
                    (hvd.Sum, stacked.sum(0)),
                    (hvd.Min, stacked.min(0)),
                    (hvd.Max, stacked.max(0)),
                    (hvd.Product, stacked.prod(0)),
                ]:
                    check(hvd.allreduce(mine, op=op), expected, mine)
                    written = make(value(hvd.rank(), shape, dtype))
                    assert hvd.allreduce_(written, op=op) is written
                    check(written, expected, mine)
                check(mine, value(hvd.rank(), shape, dtype), mine)
    exact = classic(value(hvd.rank(), (5,), "float64"))
    mean = np.mean(everybodys((5,), "float64"), axis=0)
    check(hvd.allreduce(exact), mean, exact)
    scaled = hvd.allreduce(exact, op=hvd.Sum, prescale_factor=1 / 3, postscale_factor=0.1).asnumpy()
    np.testing.assert_allclose(scaled, mean * hvd.size() / 30, rtol=1e-14)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(hvd.allreduce(exact, False), mean * hvd.size(), exact)
    assert any(each.category is DeprecationWarning for each in caught)


def scalars() -> None:
    mine = mx.np.array(np.float32(hvd.rank() + 1))
    check(hvd.allreduce(mine, op=hvd.Sum), np.float32(sum(range(1, hvd.size() + 1))), mine)
    hvd.broadcast_(mine, hvd.size() - 1)
    assert float(mine) == hvd.size()


def groups() -> None:
    kinds = [((3,), "float32"), ((2, 2), "int64"), ((0, 1), "float32")]
    for make in KINDS:
        mine = [make(value(hvd.rank(), *kind)) for kind in kinds]
        sums = [sum(everybodys(*kind)) for kind in kinds]
        for found, expected, each in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), sums, mine):
            check(found, expected, each)
        for found, kind, each in zip(hvd.grouped_allgather(mine), kinds, mine):
            check(found, np.concatenate(everybodys(*kind)), each)
        rows = [make(value(hvd.rank(), (5, 2), "float32")), make(value(hvd.rank(), (hvd.size(),), "int32"))]
        for found, shape, each in zip(hvd.grouped_reducescatter(rows, op=hvd.Sum), [(5, 2), (hvd.size(),)], rows):
            total = sum(everybodys(shape, str(np.dtype(each.dtype))))
            check(found, np.array_split(total, hvd.size())[hvd.rank()], each)
        written = [make(value(hvd.rank(), *kind)) for kind in kinds]
        hvd.grouped_allreduce_(written, op=hvd.Sum, name="group")
        for found, expected, each in zip(written, sums, mine):
            check(found, expected, each)
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []


def rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    for make in KINDS:
        ragged = make(value(rank, (rank, 2), "float32"))
        check(hvd.allgather(ragged), np.concatenate([value(r, (r, 2), "float32") for r in range(size)]), ragged)
        mine = make(value(rank, (size * 2,), "int32"))
        parts = [array[rank * 2 : rank * 2 + 2] for array in everybodys((size * 2,), "int32")]
        check(hvd.alltoall(mine), np.concatenate(parts), mine)
        splits = [(rank + to) % 2 for to in range(size)]
        for given in (splits, mx.nd.array(splits, dtype="int32")):
            found, counts = hvd.alltoall(mine, splits=given)
            expected = []
            for source, array in enumerate(everybodys((size * 2,), "int32")):
                theirs = [(source + to) % 2 for to in range(size)]
                start = sum(theirs[:rank])
                expected.append(array[start : start + theirs[rank]])
            check(found, np.concatenate(expected), mine)
            assert counts.asnumpy().tolist() == [len(part) for part in expected]
            assert np.dtype(counts.dtype) == np.int32
        mean = np.mean(everybodys((3, 2), "float32"), axis=0)
        part = hvd.reducescatter(make(value(rank, (3, 2), "float32")))
        np.testing.assert_allclose(part.asnumpy(), np.array_split(mean, size)[rank], rtol=1e-6)


def broadcasts() -> None:
    for root in range(hvd.size()):
        for make in KINDS:
            mine = make(value(hvd.rank(), (3, 4), "float32"))
            check(hvd.broadcast(mine, root, name="b"), value(root, (3, 4), "float32"), mine)
            # A view of other rows is not contiguous in its array.
            whole = make(value(hvd.rank(), (4, 3), "float32"))
            hvd.broadcast_(whole[1:3] if make is newer else whole, root)
        assert hvd.broadcast_object({"rank": hvd.rank()}, root) == {"rank": root}
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * rank for rank in range(hvd.size())]


def sets() -> None:
    last = hvd.add_process_set([hvd.size() - 1])
    # Two ranks are all ranks.
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [0]
    ends = hvd.add_process_set(members)
    mine = classic(value(hvd.rank(), (3,), "float64"))
    if ends.included():
        total = sum(value(rank, (3,), "float64") for rank in members)
        check(hvd.allreduce(mine, op=hvd.Sum, process_set=ends), total, mine)
        check(hvd.broadcast(mine, members[-1], process_set=ends), value(members[-1], (3,), "float64"), mine)
        hvd.barrier(process_set=ends)
    else:
        refused(ValueError, lambda: hvd.allreduce(mine, process_set=ends), "not a member")
    if last.included():
        check(hvd.allgather(mine, process_set=last), value(hvd.rank(), (3,), "float64"), mine)
    hvd.barrier()
    assert hvd.remove_process_set(ends)
    assert hvd.remove_process_set(last)


def refused(kind: type[Exception], call: Any, words: str) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def refusals() -> None:
    mine = classic(value(hvd.rank(), (4,), "float32"))
    refused(TypeError, lambda: hvd.allreduce(np.zeros(3)), "no array of MXNet")
    refused(TypeError, lambda: hvd.allreduce(mine.reshape((2, 2)).tostype("row_sparse")), "tostype('default')")
    refused(ValueError, lambda: hvd.allreduce(mine, average=True, op=hvd.Sum), "supersedes")
    refused(ValueError, lambda: hvd.broadcast(mine, hvd.size()), "invalid root rank")
    refused(ValueError, lambda: hvd.alltoall(mine, splits=[1]), "one for each of the")
    refused(ValueError, lambda: hvd.alltoall(mine, splits=[9] * hvd.size()), "more than the 4 rows")
    refused(ValueError, lambda: hvd.alltoall(mine, splits=[0.5] * hvd.size()), "integers from 0")
    refused(ValueError, lambda: hvd.reducescatter(mx.np.array(1.0)), "")
    refused(ValueError, lambda: hvd.broadcast_parameters([mine]), "give Block.collect_params()")
    refused(ValueError, lambda: hvd.broadcast_parameters({"w": 1}), "neither an array nor a parameter")
    shape = (3,) if hvd.rank() == 0 else (4,)
    refused(hvd.MismatchError, lambda: hvd.allreduce(classic(value(0, shape, "float32")), name="differs"), "differs")


def main() -> None:
    try:
        hvd.allreduce(classic(np.zeros(1, "float32")))
    except ValueError as error:
        assert "init" in str(error), error
    else:
        raise AssertionError("no ValueError before init")
    hvd.init(process_sets="dynamic")
    assert hvd.is_initialized()
    assert (hvd.gloo_built(), hvd.mpi_built(), hvd.nccl_built(), hvd.ddl_built(), hvd.ccl_built()) == (
        True,
        False,
        0,
        False,
        False,
    )
    assert hvd.local_rank() < hvd.local_size() <= hvd.size() == hvd.max_size()
    for step in (reductions, scalars, groups, rows, broadcasts, sets, refusals):
        step()
    print(f"rank {hvd.rank()} of {hvd.size()}: checks passed", flush=True)
    hvd.shutdown()
    assert not hvd.is_initialized()


if __name__ == "__main__":
    main()
