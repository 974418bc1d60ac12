"""How the tasks of a run exchange what they need to begin: by Spark's barrier, over Spark's own connections."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from ronde.errors import RondeError, TimedOutError


class Exchange:
    """All-gathers of the tasks of a stage, in barrier execution.

    context -- the task's `pyspark.BarrierTaskContext`
    timeout -- seconds for all of them together
    """

    def __init__(self, context: Any, timeout: float) -> None:
        self._context = context
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def remaining(self) -> float:
        """Returns the seconds until the deadline; 0 after it."""
        return max(0.0, self._deadline - time.monotonic())

    def gather(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all tasks, by partition. They are JSON.

        what -- what the tasks report, for the error

        Raises TimedOutError after the deadline.
        """
        received: list[list[str]] = []
        errors: list[Exception] = []

        def call() -> None:
            try:
                received.append(self._context.allGather(json.dumps(value)))
            except Exception as error:  # of Spark, in the other thread
                errors.append(error)

        # Spark's call has no timeout.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(self.remaining())
        if errors:
            raise RondeError(f"Spark's barrier has failed while the tasks reported {what}: {errors[0]}", "connect")
        if not received:
            raise TimedOutError(
                f"the tasks have not all reported {what} within {self._timeout:.0f} s; the executors' logs say why. If "
                "they only need more time, raise start_timeout",
                "start",
            )
        return [json.loads(text) for text in received[0]]
