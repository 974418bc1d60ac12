"""Run by every rank of at least three: bad input raises with the reason, nothing hangs, and the next operation works.

The sidecar has little room for tensors: see ARENA_MB in `test_worlds.py`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable

import numpy
from thread_calls import together

import ronde

if TYPE_CHECKING:
    from collections.abc import Iterator

X = numpy.ones(4, numpy.float32)
Kind = type[Exception]


class Trial:
    """Calls that must fail, each followed by one that must succeed."""

    def __init__(self, client: ronde.Client) -> None:
        self.client = client
        self.count = 0

    @property
    def odd(self) -> bool:
        """Whether this is the one rank that does something else."""
        return self.client.rank == self.client.size - 1

    @contextlib.contextmanager
    def fails(self, kind: Kind, *words: str) -> Iterator[None]:
        """On this rank; afterwards all ranks can go on."""
        self.count += 1
        try:
            yield
        except kind as error:
            text = str(error)
            missing = [word for word in words if word not in text]
            assert not missing, f"{text!r} lacks {missing}"
        else:
            raise AssertionError(f"this succeeded, but should have raised {words}")
        self.goes_on()

    def goes_on(self) -> None:
        """The next operation of all ranks works."""
        total = self.client.allreduce(numpy.ones(3), op=ronde.Sum, name=f"after {self.count}")
        numpy.testing.assert_array_equal(total, self.client.size)

    def differ(self, *words: str, call: Callable[..., Any], most: dict[str, Any], one: dict[str, Any]) -> None:
        """Ranks that submit different requests fail; afterwards the same name works."""
        name = f"differing {self.count}"
        with self.fails(ronde.MismatchError, *words):
            call(name=name, **(one if self.odd else most))
        call(name=name, **most)


def check_mismatches(trial: Trial) -> None:
    """Each property that ranks must agree on has Horovod's error message."""
    client, last = trial.client, trial.client.size - 1
    double, longer, whole = X.astype(numpy.float64), numpy.ones(5, numpy.float32), numpy.ones((4, 2), numpy.float32)
    one_rank = "but another rank"
    for call in (client.allreduce, client.reduce_scatter):
        operation = "Mismatched " + ("ALLREDUCE" if call == client.allreduce else "REDUCESCATTER") + " tensor shapes"
        trial.differ("Mismatched data types", one_rank, call=call, most={"tensor": X}, one={"tensor": double})
        trial.differ(operation, "[4]", "[5]", call=call, most={"tensor": X}, one={"tensor": longer})
        options = {"tensor": X, "op": ronde.Sum}
        trial.differ("Mismatched reduction operation", call=call, most=options, one={**options, "op": ronde.Max})
        words = "Mismatched prescale and/or postscale factors"
        trial.differ(words, call=call, most=options, one={**options, "prescale_factor": 2.0})
    mine = {"tensor": X}
    trial.differ("Mismatched codecs", call=client.allreduce, most=mine, one={**mine, "codec": "bfloat16"})
    for call, operation in ((client.broadcast, "BROADCAST"), (client.reduce, "REDUCE"), (client.gather, "GATHER")):
        most, one = {**mine, "root_rank": 0}, {**mine, "root_rank": last}
        trial.differ(f"Mismatched {operation} root ranks", call=call, most=most, one=one)
    for call, words in ((client.allgather, "tensor of rank 1"), (client.alltoall, "tensor of rank 1")):
        rows = numpy.ones(client.size, numpy.float32)
        wide = numpy.ones((client.size, 2), numpy.float32)
        trial.differ(words, call=call, most={"tensor": rows}, one={"tensor": wide})
    trial.differ(
        "with dimension 1 equal to 2, but another rank sent a tensor with dimension 1 equal to 3",
        call=client.allgather,
        most={"tensor": whole},
        one={"tensor": numpy.ones((1, 3), numpy.float32)},
    )
    # Sets are agreed about as other operations are.
    with trial.fails(ronde.MismatchError, "Mismatched process sets"):
        client.add_process_set([last] if trial.odd else [0])


def check_arguments(trial: Trial) -> None:
    """Invalid arguments raise on the caller only, which may retry with valid ones."""
    client = trial.client
    n, rows = client.size, numpy.arange(client.size * 2)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("do not add up", lambda: client.alltoall(rows, [1] * n)),
        ("do not add up", lambda: client.alltoall(rows, [3] * n)),
        (f"{n + 1} splits", lambda: client.alltoall(rows, [1] * n + [n])),
        ("cannot be divided equally", lambda: client.alltoall(rows[1:])),
        ("1-D integers", lambda: client.alltoall(rows, numpy.ones(n))),
        ("does not support scalar", lambda: client.alltoall(numpy.float32(1))),
        ("does not support scalar", lambda: client.allgather(numpy.float32(1))),
        ("does not support scalar", lambda: client.gather(numpy.float32(1), 0)),
        ("does not support scalar", lambda: client.reduce_scatter(numpy.float32(1))),
        ("does not support scalar", lambda: client.grouped_reduce_scatter([X, numpy.float32(1)])),
        ("invalid root rank", lambda: client.broadcast(X, n)),
        ("invalid root rank", lambda: client.gather(X, n)),
        ("itself", lambda: client.send(X, client.rank)),
        ("not in", lambda: client.recv(n)),
        ("complex64 is not supported", lambda: client.allreduce(X.astype(numpy.complex64))),
        ("uint64 is not supported", lambda: client.allgather(X.astype(numpy.uint64))),
        ("is no tensor", lambda: client.allreduce([1.0, 2.0])),
        ("must be finite and not zero", lambda: client.allreduce(X, prescale_factor=0.0)),
        ("must be finite and not zero", lambda: client.allreduce(X, postscale_factor=float("inf"))),
        ("op is 12; give", lambda: client.allreduce(X, op=12)),
        ("op is -1; give", lambda: client.allreduce(X, op=-1)),
        ("codec zip is not known", lambda: client.allreduce(X, codec="zip")),
        ("name", lambda: client.allreduce(X, name="n" * 1_000)),
    ]
    for words, call in wrong:
        with trial.fails(ValueError, words):
            call()
    if trial.odd:
        try:
            client.alltoall(rows, [3] * n, name="second thoughts")
        except ValueError:
            pass
        else:
            raise AssertionError("splits of too many rows were accepted")
    numpy.testing.assert_array_equal(
        client.alltoall(rows, name="second thoughts"), [2 * client.rank, 2 * client.rank + 1] * n
    )


def check_refusals(trial: Trial) -> None:
    """Unsupported requests raise on all ranks."""
    client, integers = trial.client, numpy.arange(4)
    refused: list[tuple[tuple[str, ...], Callable[[], Any]]] = [
        (("cannot average bool",), lambda: client.allreduce(numpy.ones(3, bool))),
        (("adasum", "floating-point"), lambda: client.allreduce(integers, op=ronde.Adasum)),
        (("median", "floating-point"), lambda: client.allreduce(integers, op=ronde.Median)),
        (("clipped-mean", "use ALLREDUCE"), lambda: client.reduce_scatter(X, op=ronde.ClippedMean)),
        (("bit-and", "integers and bool", "float32"), lambda: client.allreduce(X, op=ronde.BitAnd)),
        (("bit-xor", "integers and bool"), lambda: client.reduce_scatter(X, op=ronde.BitXor)),
        (("float16", "float32"), lambda: client.allreduce(integers, op=ronde.Sum, codec="float16")),
        (("bfloat16", "sum or average"), lambda: client.allreduce(X, op=ronde.Max, codec="bfloat16")),
        (("at least one rank",), lambda: client.add_process_set([])),
        (("cannot have rank",), lambda: client.add_process_set([0, client.size])),
        (("twice",), lambda: client.add_process_set([0, 0])),
        (("duplicate process set",), lambda: client.add_process_set(range(client.size))),
    ]
    for words, call in refused:
        with trial.fails(ronde.RefusedError, *words):
            call()
    # A member of a group that fails leaves the others alone.
    group = client.grouped_allreduce_async([X, numpy.ones(3, bool), X], name="group")
    with trial.fails(ronde.RefusedError, "cannot average bool"):
        group.wait()
    for handle in (group._handles[0], group._handles[2]):
        numpy.testing.assert_array_equal(handle.wait(), X)


def check_names(trial: Trial) -> None:
    """A name that is pending already stays with the first."""
    client = trial.client
    first = client.allreduce_async(X, op=ronde.Sum, name="twice") if trial.odd else None
    client.barrier()
    if first is not None:
        try:
            client.allreduce(X, op=ronde.Sum, name="twice")
        except ronde.RefusedError as error:
            assert "with the same name" in str(error), error
        else:
            raise AssertionError("one name was pending twice")
    client.barrier()
    result = client.allreduce(X, op=ronde.Sum, name="twice") if first is None else first.wait()
    numpy.testing.assert_array_equal(result, client.size * X)
    trial.goes_on()


def check_sets(trial: Trial) -> None:
    """Sets without this rank, that are gone, or that go while something is pending."""
    client = trial.client
    first = client.add_process_set([0])
    if not first.included():
        with contextlib.suppress(ValueError):
            client.allreduce(X, process_set=first)
            raise AssertionError("a rank outside of the set took part")
    with trial.fails(ronde.RefusedError, "duplicate process set"):
        client.add_process_set([0])
    both = client.add_process_set([0, client.size - 1])
    pending = client.allreduce_async(X, name="pending", process_set=both) if trial.odd else None
    client.barrier()
    number = both.id
    assert client.remove_process_set(both)
    if pending is not None:
        try:
            pending.wait()
        except ronde.RefusedError as error:
            assert f"process set {number} was removed" in str(error), error
        else:
            raise AssertionError("an operation outlived its set")
    with trial.fails(ValueError, "does not exist, or has not been registered"):
        client.barrier(process_set=both)
    assert client.remove_process_set(first)


def check_join(trial: Trial) -> None:
    """Operations that are not supported while ranks have joined."""
    client, rows = trial.client, numpy.arange(trial.client.size)
    calls: list[tuple[str, Callable[[str], Any]]] = [
        ("Allreduce with reduction min", lambda name: client.allreduce(X, ronde.Min, name)),
        ("Allreduce with reduction median", lambda name: client.allreduce(X, ronde.Median, name)),
        ("Allgather", lambda name: client.allgather(X, name)),
        ("Broadcast", lambda name: client.broadcast(X, 0, name)),
        ("Alltoall", lambda name: client.alltoall(rows, None, name)),
        ("Reducescatter", lambda name: client.reduce_scatter(X, ronde.Sum, name)),
        ("Gather", lambda name: client.gather(X, 0, name)),
    ]
    if not trial.odd:
        for number, (operation, call) in enumerate(calls):
            try:
                call(f"joined {number}")
            except ronde.MismatchError as error:
                assert f"{operation} is not supported with Join" in str(error), error
            else:
                raise AssertionError(f"{operation} did without a rank")
        total = client.allreduce(X, op=ronde.Sum, name="joined")
        numpy.testing.assert_array_equal(total, (client.size - 1) * X)
    client.join()
    trial.goes_on()


def check_limits(trial: Trial) -> None:
    """A tensor for which there is no room fails on all ranks, and the next finds it."""
    client, large = trial.client, 40 << 20
    if trial.odd:
        with trial.fails(ronde.RefusedError, "arena"):
            client.allreduce(numpy.zeros(large, numpy.uint8), op=ronde.Max, name="large")
    else:
        with trial.fails(ronde.RefusedError):
            client.allreduce(numpy.zeros(large >> 5, numpy.uint8), op=ronde.Max, name="large")


def check_second_session(trial: Trial) -> None:
    """A process that connects again keeps its session, and learns that it has one."""
    with trial.fails(ronde.RondeError, f"this process has a session of rank {trial.client.rank} already", "RONDE-E311"):
        ronde.connect()


def check_values(trial: Trial) -> None:
    """NaN, infinity and empty tensors are not errors."""
    client = trial.client
    special = numpy.array([numpy.nan, numpy.inf, -numpy.inf, 1.0]) if trial.odd else numpy.ones(4)
    for op, want in (
        (ronde.Sum, [numpy.nan, numpy.inf, -numpy.inf, client.size]),
        (ronde.Min, [numpy.nan, 1.0, -numpy.inf, 1.0]),
        (ronde.Max, [numpy.nan, numpy.inf, 1.0, 1.0]),
    ):
        numpy.testing.assert_array_equal(client.allreduce(special, op=op), want)
    nothing = numpy.zeros((0, 3), numpy.int16)
    assert client.allreduce(nothing).shape == (0, 3)
    assert client.allgather(nothing).shape == (0, 3)
    assert client.reduce_scatter(nothing, op=ronde.Sum).shape == (0, 3)
    assert client.alltoall(nothing).shape == (0, 3)
    assert client.broadcast(nothing, 0).shape == (0, 3)
    assert client.scatter(nothing, 0).shape == (0, 3)
    trial.goes_on()


def check_threads(trial: Trial) -> None:
    """Threads that wait for one operation in flight: each gets its result, or its own timeout."""
    client = trial.client
    if not trial.odd:
        handle = client.allreduce_async(numpy.ones(3), ronde.Sum, "threads")
        errors = together(*3 * [lambda: handle.wait(0.2)])
        assert all(isinstance(error, TimeoutError) for error in errors), errors
    client.barrier("threads have waited")
    if trial.odd:
        handle = client.allreduce_async(numpy.ones(3), ronde.Sum, "threads")
    results = together(*3 * [handle.wait])
    assert all(result is results[0] for result in results), results
    numpy.testing.assert_array_equal(results[0], numpy.full(3, client.size))


def main() -> None:
    """Runs all checks on one session."""
    with ronde.connect() as client:
        trial = Trial(client)
        for check in (
            check_mismatches,
            check_arguments,
            check_refusals,
            check_names,
            check_sets,
            check_join,
            check_limits,
            check_second_session,
            check_values,
            check_threads,
        ):
            check(trial)
        client.barrier("end")
        print(f"rank {client.rank}: bad input raised with the reason", flush=True)
        client.barrier("really")


if __name__ == "__main__":
    main()
