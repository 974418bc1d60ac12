"""Starts the process of a rank, passes its output on, and waits for its outcome."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Callable, NamedTuple

from ronde.cluster.rank import FAILURE, HEADER, RESULT, Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

_STDERR_LINES = 20
_END_TIMEOUT_S = 5.0
# Processes that a rank started may keep its output open, and, if it was killed, the pipe of its outcome.
_OUTPUT_TIMEOUT_S = 2.0
_OUTCOME_TIMEOUT_S = 30.0
# From the outcome to the end of the interpreter, which waits for the threads that the function has left.
_EXIT_TIMEOUT_S = 30.0


class Outcome(NamedTuple):
    """How the process of a rank has ended: with a pickled result, or a failure."""

    result: bytes | None
    failure: Failure | None


class SupervisedRank:
    """A process that makes one call. It ends when the thread that makes this object ends.

    python    -- the interpreter
    call      -- the pickled call, as `ronde.run` makes it
    variables -- its environment
    emit      -- called with "stdout" or "stderr" and a line of output, in separate threads
    """

    def __init__(
        self, python: str, call: bytes, variables: Mapping[str, str], emit: Callable[[str, bytes], None]
    ) -> None:
        self._emit = emit
        self._name = f"rank {variables['RONDE_RANK']}" if "RONDE_RANK" in variables else "a rank"
        self._last: list[bytes] = []
        self._received: bytes | None = None
        reading, writing = os.pipe()
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                [python, "-m", "ronde.cluster.rank", str(writing), str(os.getpid())],
                env={**variables, "PYTHONUNBUFFERED": "1"},
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                pass_fds=[writing],
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._outcome_reader = self._thread(self._read_outcome, os.fdopen(reading, "rb"))
        self._thread(self._write_call, process.stdin, call)
        self._output_readers = [
            self._thread(self._read_output, "stdout", process.stdout),
            self._thread(self._read_output, "stderr", process.stderr),
        ]

    @property
    def pid(self) -> int:
        """The ID of the process."""
        return self._process.pid

    def wait(self) -> Outcome:
        """Waits for the end of the process, and returns its outcome. A process that stays after that is ended."""
        status = self._process.wait()
        self._join([self._outcome_reader], _OUTCOME_TIMEOUT_S)
        self._join(self._output_readers, _OUTPUT_TIMEOUT_S)
        received = self._received
        if received is None:
            return Outcome(None, Failure(self._how_ended(status)))
        kind, content = received[:1], received[HEADER.size :]
        if kind == RESULT:
            return Outcome(content, None)
        assert kind == FAILURE
        return Outcome(None, Failure(**json.loads(content)))

    def end(self) -> None:
        """Ends the process and those of its session."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
                return

    def _how_ended(self, status: int) -> str:
        if status < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
                return self._with_output(f"its process {how}")
            return self._with_output(f"its process was killed by signal {-status}")
        return self._with_output(f"its process ended with status {status} before the function returned")

    def _with_output(self, text: str) -> str:
        lines = b"".join(self._last[-_STDERR_LINES:]).decode(errors="replace")
        return f"{text}. The last lines of its standard error:\n{lines}" if lines else text

    @staticmethod
    def _thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        thread.start()
        return thread

    @staticmethod
    def _join(threads: list[threading.Thread], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @staticmethod
    def _write_call(pipe: IO[bytes], call: bytes) -> None:
        with contextlib.suppress(OSError), pipe:  # the process has ended, which `wait` reports
            pipe.write(call)

    def _read_outcome(self, pipe: IO[bytes]) -> None:
        with pipe:
            header = pipe.read(HEADER.size)
            if len(header) < HEADER.size:
                return
            length = HEADER.unpack(header)[1]
            content = pipe.read(length)
        if len(content) < length:
            return
        self._received = header + content
        self._limit_exit()

    def _limit_exit(self) -> None:
        """Ends the process if it does not end by itself now that its outcome is there."""
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(
                f"ronde: the function of {self._name} has ended, but its process {self.pid} has not exited within "
                f"{_EXIT_TIMEOUT_S:.0f} s, so it is killed now: perhaps a thread that is no daemon still runs. Let the "
                "function join its threads before it returns, or start them with daemon=True",
                file=sys.stderr,
                flush=True,
            )
            self.end()

    def _read_output(self, name: str, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                if name == "stderr":
                    self._last = [*self._last[1 - _STDERR_LINES :], line]
                try:
                    self._emit(name, line)
                except Exception as error:  # the rank must not stop at a full pipe
                    print(f"ronde: output of a rank cannot be passed on: {error}", file=sys.stderr)
