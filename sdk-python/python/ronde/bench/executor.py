"""What a rank does when it is its backend's turn."""

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
    """A rank between turns: its backend, and the case that is open."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._open: _OpenCase | None = None
        self._training: Any = None
        # Collections would fall into timed spans at random; garbage is collected when a case ends.
        gc.disable()

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Does what a command says; the answer to it."""
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
    """One collective at one size: its memory, and the ways to do it."""

    def __init__(self, backend: Backend, collective: str, count: int, seed: int) -> None:
        self.backend = backend
        self.draw = Draw(collective, count, backend.ranks, seed, 0)
        # All-gather's input is a share of its result.
        self.input_count = count // backend.ranks if collective == "allgather" else count
        self.tensor: Array = numpy.empty(count, numpy.float32)
        self.operations: dict[str, Operation] = backend.operations(collective, self.tensor)
        self.result: Any = None
        self.repeats = 1
        # Of results that are not known beforehand.
        self.digest: Any = None

    def measure(self, variant: str, first: int, iterations: int) -> dict[str, Any]:
        """Times iterations one by one, each from a barrier to this rank's result, and checks every element of each."""
        operation = self.operations[variant]
        nanoseconds = []
        digest = self.digest = _digest_of(variant)
        for iteration in range(first, first + iterations):
            self._fill(iteration)
            self.result = None  # new memory of the last iteration is given back outside of the timed span
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
        """Does the collective again and again, without barriers and checks.

        An all-reduce in place reduces its own result; so that numbers stay finite, the input is copied back now and
        then, for all backends alike.
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
            # What a codec loses and a reducer makes is theirs; all ranks get the same, which who asks compares.
            self.digest.update(result.tobytes())
            return None
        wrong = data.find_wrong(self.draw, self.backend.rank, result, self.repeats)
        return None if wrong is None else {"iteration": self.draw.iteration, **dataclasses.asdict(wrong)}


def _prepare(operation: Operation) -> None:
    """The input has been drawn."""
    if isinstance(operation, Prepared):
        operation.prepare()


def _digest_of(variant: str) -> Any:
    """Of results by codecs and reducers; None for those that are known beforehand."""
    return hashlib.sha256() if variant.startswith((CODEC, REDUCER)) else None
