"""Executes the benchmark's commands on a rank."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import time
from typing import TYPE_CHECKING, Any

import numpy

from ronde.bench import data
from ronde.bench.backends import CODEC, IN_PLACE, REDUCER, Prepared
from ronde.bench.data import Draw

if TYPE_CHECKING:
    from ronde.bench.backends import Array, Backend, Operation


class Executor:
    """The state of a rank: its backend, and the open case."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._open: _OpenCase | None = None
        self._training: Any = None
        # Garbage collection during timed spans would distort them. It runs when a case ends.
        gc.disable()

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Executes a command. Returns the answer."""
        what = command.pop("do")
        if what.startswith("train"):
            return self._train(what, command)
        if what == "open":
            self._open = _OpenCase(self.backend, **command)
            return {"variants": list(self._open.operations)}
        if what == "close":
            self._open = self._training = None
            gc.collect()
            return {}
        assert self._open is not None  # the benchmark opens a case before it measures
        answer: dict[str, Any] = getattr(self._open, what)(**command)
        return answer

    def _train(self, what: str, command: dict[str, Any]) -> dict[str, Any]:
        from ronde.bench.training import Trainer  # PyTorch is slow to load, and ranks of MPI do without

        if what == "train_open":
            self._training = Trainer(self.backend, **command)
            return {}
        answer: dict[str, Any] = getattr(self._training, what)(**command)
        return answer


class _OpenCase:
    """One collective at one size: its memory and variants."""

    def __init__(self, backend: Backend, collective: str, count: int, seed: int) -> None:
        self.backend = backend
        self.draw = Draw(collective, count, backend.ranks, seed, 0)
        # All-gather's input is a share of its result.
        self.input_count = count // backend.ranks if collective == "allgather" else count
        self.tensor: Array = numpy.empty(count, numpy.float32)
        self.operations: dict[str, Operation] = backend.operations(collective, self.tensor)
        self.result: Any = None
        self.repeats = 1
        # The digest of results that have no reference.
        self.digest: Any = None

    def measure(self, variant: str, first: int, iterations: int) -> dict[str, Any]:
        """Times iterations one by one, each from a barrier to this rank's result, and checks every element of each."""
        operation = self.operations[variant]
        nanoseconds = []
        digest = self.digest = _digest_of(variant)
        for iteration in range(first, first + iterations):
            self._fill(iteration)
            self.result = None  # releases memory of the last iteration outside of the timed span
            _prepare(operation)
            self.backend.barrier()
            start = time.perf_counter_ns()
            result = operation()
            nanoseconds.append(time.perf_counter_ns() - start)
            self.result, self.repeats = result, 1
            if wrong := self._find_wrong():
                return {"nanoseconds": nanoseconds, "wrong": wrong}
        return {"nanoseconds": nanoseconds, **({"digest": digest.hexdigest()} if digest else {})}

    def prepare(self, iteration: int) -> dict[str, Any]:
        """Draws the input of a loop."""
        self._fill(iteration)
        self.result = None
        return {}

    def loop(self, variant: str, iterations: int) -> dict[str, Any]:
        """Repeats the collective without barriers and checks.

        An all-reduce in place reduces its own result. To keep numbers finite, the input is restored from time to time,
        for all backends alike.
        """
        operation = self.operations[variant]
        _prepare(operation)
        self.digest = _digest_of(variant)
        grows = variant == IN_PLACE and self.draw.collective == "allreduce"
        burst = data.repeats_max(self.backend.ranks) if grows else iterations
        pristine = self.tensor.copy() if iterations > burst else self.tensor
        start = time.perf_counter_ns()
        for done in range(0, iterations, burst):
            if done:
                numpy.copyto(self.tensor, pristine)
            self.repeats = min(burst, iterations - done) if grows else 1
            for _ in range(min(burst, iterations - done)):
                self.result = operation()
        return {"nanoseconds": time.perf_counter_ns() - start}

    def check(self) -> dict[str, Any]:
        """Checks the last result of a loop."""
        if wrong := self._find_wrong():
            return {"wrong": wrong}
        return {"digest": self.digest.hexdigest()} if self.digest else {}

    def _fill(self, iteration: int) -> None:
        self.draw = dataclasses.replace(self.draw, iteration=iteration)
        self.draw.fill(self.tensor[: self.input_count], self.backend.rank)

    def _find_wrong(self) -> dict[str, Any] | None:
        result = numpy.asarray(self.result)  # shares a tensor's memory
        if self.digest:
            # Results of codecs and reducers have no reference. All ranks get the same, which the benchmark compares.
            self.digest.update(result.tobytes())
            return None
        wrong = data.find_wrong(self.draw, self.backend.rank, result, self.repeats)
        return None if wrong is None else {"iteration": self.draw.iteration, **dataclasses.asdict(wrong)}


def _prepare(operation: Operation) -> None:
    """Prepares an operation after its input was drawn."""
    if isinstance(operation, Prepared):
        operation.prepare()


def _digest_of(variant: str) -> Any:
    """Returns a digest for results of codecs and reducers; None for results with a reference."""
    return hashlib.sha256() if variant.startswith((CODEC, REDUCER)) else None
