"""Logs how long the steps of a training run take, and how much of that goes to communication.

    from ronde.monitor import StepMonitor, TensorBoardLog

    monitor = StepMonitor(TensorBoardLog("runs/1"))
    for batch in data:
        ...
        optimizer.step()
        monitor.step()

Each rank has its own values: log those of rank 0, unless you search for a straggler, which waits least. All front ends
count: the clients of this process are measured, whoever has opened them. With Lightning,
`ronde.lightning.StepMonitorCallback` calls the monitor; with Keras, a `LambdaCallback` does.
"""

from __future__ import annotations

import atexit
import os
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Protocol

from ronde import _ronde

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Log", "StepMonitor", "StepReport", "TensorBoardLog", "Usage", "WandbLog", "usage"]

# How the values are named in logs.
PREFIX = "ronde/"


class Usage(NamedTuple):
    """What the clients of this process have done since it began.

    operations        -- the operations that they submitted
    bytes             -- the bytes of their inputs
    in_flight_seconds -- how long at least one operation was in flight
    waiting_seconds   -- how long threads waited for results; threads that wait at the same time count each for itself
    """

    operations: int
    bytes: int
    in_flight_seconds: float
    waiting_seconds: float


def usage() -> Usage:
    """Returns what the clients of this process have done since it began: those of all front ends and past epochs.

    A forked process begins with zeros.
    """
    return Usage(*_ronde.usage())


class StepReport(NamedTuple):
    """Means over the last steps.

    step_seconds        -- the time from one step's end to the next one's
    in_flight_share     -- the share of that time for which operations were in flight, beside computation or not
    waiting_share       -- the share for which threads waited for results; above 1 if several wait at the same time. 0
                           where no thread of ronde's waits: in DistributedDataParallel, TensorFlow and JAX
    bytes_per_step      -- the bytes of the tensors that this rank submitted
    operations_per_step -- the operations that this rank submitted
    """

    step_seconds: float
    in_flight_share: float
    waiting_share: float
    bytes_per_step: float
    operations_per_step: float

    def values(self) -> dict[str, float]:
        """Returns the values by the names that logs show."""
        return {PREFIX + name: value for name, value in self._asdict().items()}


class Log(Protocol):
    """Where values go."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Writes the values of a step, counted from 1."""
        ...


class StepMonitor:
    """Measures steps, and writes to logs.

    logs  -- where the values go; none: use what `step` returns
    every -- after how many steps values are written, as means over these; at least 1

    The first step begins with the construction. Counts operations of all threads of the process.
    """

    def __init__(self, *logs: Log, every: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        if every < 1:
            raise ValueError(f"every={every} is not a number of steps; it is at least 1")
        self.steps = 0
        self._logs, self._every, self._clock = logs, every, clock
        self._begin()

    def _begin(self) -> None:
        self._paused: tuple[float, Usage] | None = None
        self._since, self._before, self._first = self._clock(), usage(), self.steps

    def pause(self) -> None:
        """Stops measuring until `resume`: what happens meanwhile, such as a validation, is no part of a step."""
        if self._paused is None:
            self._paused = self._clock(), usage()

    def resume(self) -> None:
        """Continues measuring after `pause`."""
        if self._paused is not None:
            since, then = self._paused
            self._since += self._clock() - since
            was, now = self._before, usage()
            self._before = Usage(
                was.operations + now.operations - then.operations,
                was.bytes + now.bytes - then.bytes,
                was.in_flight_seconds + now.in_flight_seconds - then.in_flight_seconds,
                was.waiting_seconds + now.waiting_seconds - then.waiting_seconds,
            )
            self._paused = None

    def step(self) -> StepReport | None:
        """Ends a step. Returns the means since the last report, and writes them, if there is one at this step."""
        self.steps += 1
        return self.report() if self.steps - self._first >= self._every else None

    def report(self) -> StepReport | None:
        """Reports now. Returns the means since the last report, and writes them; None without a step since then.

        A pause ends with it.
        """
        self.resume()
        steps = self.steps - self._first
        if steps == 0:
            return None
        seconds, now, before = self._clock() - self._since, usage(), self._before
        flown, waited = now.in_flight_seconds - before.in_flight_seconds, now.waiting_seconds - before.waiting_seconds
        report = StepReport(
            step_seconds=seconds / steps,
            in_flight_share=flown / seconds if seconds > 0 else 0.0,
            waiting_share=waited / seconds if seconds > 0 else 0.0,
            bytes_per_step=(now.bytes - before.bytes) / steps,
            operations_per_step=(now.operations - before.operations) / steps,
        )
        # Not part of the next step: the time that logs take.
        for log in self._logs:
            log.write(report.values(), self.steps)
        self._begin()
        return report


class TensorBoardLog:
    """Writes scalars for TensorBoard. What is buffered is written at the end of the process, too.

    target -- a folder, for which PyTorch's SummaryWriter is made; or a writer that has `add_scalar(tag, value, step)`,
              such as that of PyTorch or tensorboardX

    Raises ImportError with the packages to install if a writer has to be made and cannot.
    """

    def __init__(self, target: Any) -> None:
        is_folder = isinstance(target, (str, os.PathLike))
        self._writer = _summary_writer(os.fspath(target)) if is_folder else target
        if not callable(getattr(self._writer, "add_scalar", None)):
            raise TypeError(f"{type(target).__name__} is neither a folder nor a writer with the method add_scalar")
        self._is_own = is_folder
        if is_folder:
            # The writer's thread ends with the process, whatever it has not written.
            atexit.register(self._writer.close)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Adds one scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is buffered, and closes the writer that was made for a folder."""
        if self._is_own:
            atexit.unregister(self._writer.close)
            self._writer.close()


def _summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoardLog of a folder needs PyTorch and TensorBoard: pip install torch tensorboard; or pass a writer"
        ) from error
    return SummaryWriter(folder)


class WandbLog:
    """Adds values to a run of Weights & Biases: they become part of the program's next `run.log`, at its step.

    run    -- the run; default: the one that `wandb.init` has begun
    commit -- whether the values are a separate step, for programs that log nothing else

    Raises ImportError if wandb is needed and not installed, and RuntimeError if there is no run.
    """

    def __init__(self, run: Any = None, *, commit: bool = False) -> None:
        self._run = _current_run() if run is None else run
        self._commit = commit

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Adds the values."""
        self._run.log(dict(values), commit=self._commit)


def _current_run() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError("WandbLog needs Weights & Biases: pip install wandb") from error
    if wandb.run is None:
        raise RuntimeError("there is no run of Weights & Biases: call wandb.init() before, or pass a run")
    return wandb.run
