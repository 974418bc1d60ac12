"""Run as each rank: random operations on random process sets until the file RONDE_SOAK_STOP exists.

A failure that ends the epoch is reported, and the rank connects again. Prints one JSON object a line:

    {"operations": n, "elements": n, "wrong": n}     once a second, of this process
    {"connected": true}                              an epoch has begun
    {"failed": cause, "rank": r, "sidecar": s, "text": text}
    {"fault": "plugin that traps" | "memory limit reached", "me": rank, "text": what is wrong about it, or nothing}
    {"bad": n, "what": text}                       an operation with wrong elements
    {"stopped": true}                                at the end
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import time
from typing import Any, Callable

import numpy
import ronde

from soak.operations import Operation, draw, expected, submit, wrong_elements

# Longer than the parent waits for progress, so that a hang is seen as one.
OPERATION_TIMEOUT_S = 300.0
# Others may be slow to come back; the parent bounds it.
START_TIMEOUT_S = 60.0
RECONNECT_PAUSE_S = 0.2
REPORT_S = 1.0
STEPS_PER_STOP = 8
# Process sets that are drawn besides that of all ranks; fewer where one is drawn twice.
SETS = 3
# Of all steps, those with a fault in them.
FAULTY_SHARE = 1 / 150
# More than the inputs of one worker may take (`--arena-mb` of the sidecars).
TOO_LARGE_BYTES = 80 << 20
# For the test that a wrong element is found: each result gets one.
SPOILS = os.environ.get("RONDE_SOAK_SPOIL") == "1"


def report(**fields: Any) -> None:
    """Writes a line for the parent."""
    print(json.dumps(fields), flush=True)


class Work:
    """The totals of this process, over all its sessions."""

    def __init__(self) -> None:
        self.operations = self.elements = self.wrong = 0
        self.stop = pathlib.Path(os.environ["RONDE_SOAK_STOP"])
        self._reported = 0.0

    def session(self, client: ronde.Client) -> None:
        """Random steps until all ranks stop."""
        report(connected=True)
        # The ranks of an epoch draw alike.
        drawn = client.broadcast(numpy.array([random.SystemRandom().getrandbits(60)]), 0, "seed")
        rng = random.Random(int(drawn[0]))
        sets = {tuple(range(client.size)): client.global_process_set}
        for _ in range(SETS):
            ranks = tuple(sorted(rng.sample(range(client.size), rng.randint(2, client.size))))
            if ranks not in sets:
                sets[ranks] = client.add_process_set(ranks)
        for step in range(sys.maxsize):
            if step % STEPS_PER_STOP == 0:
                is_over = client.allreduce(numpy.array([self.stop.exists()]), ronde.Max, "stop")
                if is_over[0]:
                    return
            if rng.random() < FAULTY_SHARE:
                self._faulty(client, rng.choice(list(FAULTS)), step)
            self._step(client, rng, sets, step)

    def _step(self, client: ronde.Client, rng: random.Random, sets: dict[tuple[int, ...], Any], step: int) -> None:
        """Some operations in flight at once, submitted in this rank's own order. Every third step repeats its names."""
        drawn = [
            draw(rng, f"{'again' if step % 3 == 0 else step}.{index}", list(sets)) for index in range(rng.randint(1, 6))
        ]
        mine = [each for each in drawn if client.rank in each.ranks]
        own_order = random.sample(mine, len(mine))
        waits = [(each, submit(client, each, sets[each.ranks], client.rank)) for each in own_order]
        for operation, wait in waits:
            self._check(operation, wait(), client.rank)
        now = time.monotonic()
        if now - self._reported > REPORT_S:
            self._reported = now
            report(operations=self.operations, elements=self.elements, wrong=self.wrong)

    def _check(self, operation: Operation, got: Any, me: int) -> None:
        wanted = expected(operation, me)
        if SPOILS and got is not None and got.size:
            got.flat[0] += 1
        wrong = wrong_elements(got, wanted)
        self.operations += 1
        self.elements += 0 if wanted is None else wanted.size
        self.wrong += wrong
        if wrong:
            report(bad=wrong, what=f"{operation}: got {got!r:.200}, expected {wanted!r:.200}")

    def _faulty(self, client: ronde.Client, fault: str, step: int) -> None:
        """An operation that must fail on all ranks with its cause, after which the job goes on."""
        call, words = FAULTS[fault]
        try:
            call(client, f"fault.{step}")
        except ronde.RefusedError as error:
            text = "" if words in str(error) else str(error)
        else:
            text = "it went well"
        report(fault=fault, me=client.rank, text=text)


def _trap(client: ronde.Client, name: str) -> None:
    client.allreduce(numpy.ones(100, numpy.float32), ronde.PluginOp("faulty"), name)


def _too_large(client: ronde.Client, name: str) -> None:
    client.allreduce(numpy.empty(TOO_LARGE_BYTES, numpy.uint8), ronde.Max, name)


FAULTS: dict[str, tuple[Callable[[ronde.Client, str], None], str]] = {
    "plugin that traps": (_trap, "trap"),
    "memory limit reached": (_too_large, "arena"),
}


def main() -> int:
    """Sessions one after another; the exit status."""
    work = Work()
    while True:
        try:
            with ronde.connect(operation_timeout=OPERATION_TIMEOUT_S, start_timeout=START_TIMEOUT_S) as client:
                work.session(client)
            report(operations=work.operations, elements=work.elements, wrong=work.wrong)
            report(stopped=True)
            return 0
        except ronde.RondeError as error:
            # A rank that has stopped ends the session of all.
            if work.stop.exists() and isinstance(error, ronde.ShutDownError):
                report(stopped=True)
                return 0
            report(failed=error.cause, rank=error.rank, sidecar=error.sidecar, text=str(error)[:500])
        time.sleep(RECONNECT_PAUSE_S)


if __name__ == "__main__":
    sys.exit(main())
