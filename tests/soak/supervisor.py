"""Injects one fault after another, and checks that the job survives each, or names its culprit and comes back."""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import time
from typing import Any

from soak.faults import FAULTS, Culprit, Expected
from soak.processes import Job, Process, Usage, last, usage

# From the end of a fault until all ranks have done something again: starting a worker and a sidecar, and an epoch.
RECOVERY_S = 90.0
# Until all ranks are notified of an end: the peer timeout, and what a loaded machine needs.
NOTICE_S = 30.0
POLL_S = 0.1
# After its start a sidecar's memory grows for this long: buffers of the first operations, and of the first faults.
WARM_S = 20.0


@dataclasses.dataclass
class Tally:
    """The events so far."""

    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    hangs: list[str] = dataclasses.field(default_factory=list)
    wrong_culprits: list[str] = dataclasses.field(default_factory=list)
    wrong_elements: list[str] = dataclasses.field(default_factory=list)
    epochs: int = 0


@dataclasses.dataclass
class Growth:
    """What a sidecar used first and last, and how many seconds lie between."""

    host: int
    began: float
    first: Usage
    last: Usage
    seconds: float = 0.0


class Supervisor:
    """Watches a job."""

    def __init__(self, job: Job, rng: random.Random, faults: list[str]) -> None:
        self.job, self.rng, self._faults = job, rng, faults
        self._shown = [0, 0, 0]
        self.tally = Tally()
        self._growths: dict[int, Growth] = {}
        self._bag: list[str] = []
        self._checked_until = time.monotonic()
        self._checked: dict[int, int] = collections.defaultdict(int)

    def await_progress(self, since: float, what: str) -> bool:
        """Waits until all ranks have done something after a time; otherwise that is a hang."""
        end = time.monotonic() + RECOVERY_S
        while time.monotonic() < end:
            waiting = [rank for rank, worker in enumerate(self.job.workers) if not _has_worked(worker, since)]
            if not waiting:
                return True
            time.sleep(POLL_S)
        text = ", ".join(f"rank {rank}: {self.job.workers[rank].lines[-2:]}" for rank in waiting)
        ended = "".join(f"; {self.job.end_of_sidecar(host)}" for host in range(len(self.job.sidecars)))
        self.tally.hangs.append(f"{what}: nothing done for {RECOVERY_S:.0f} s by {text}{ended}")
        return False

    def inject(self) -> str:
        """The next fault, from its beginning until the job works again. All kinds come before one comes again."""
        if not self._bag:
            self._bag = self.rng.sample(self._faults, len(self._faults))
        name = self._bag.pop()
        self.check_nobody_failed("between faults", self._checked_until)
        began = time.monotonic()
        with FAULTS[name](self.job, self.rng) as expected:
            if isinstance(expected, Culprit):
                self._await_notice(name, began, expected)
                self._check_culprit(name, began, expected)
        self.tally.faults[name] += 1
        if not self.await_progress(time.monotonic(), name):
            self.job.start_again()
            self.await_progress(time.monotonic(), "start after a hang")
        else:
            self._check_the_others(name, began, expected)
        self._checked_until = time.monotonic()
        self.collect()
        return name

    def collect(self) -> None:
        """Counts what workers have reported since the last time."""
        for worker in [*self.job.past, *self.job.workers]:
            lines = worker.lines[self._checked[id(worker)] :]
            self._checked[id(worker)] += len(lines)
            for line in lines:
                if "what" in line:
                    self.tally.wrong_elements.append(line["what"])
                if "fault" in line:
                    self.tally.faults[line["fault"]] += line["me"] == 0
                    if line["text"]:
                        self.tally.wrong_culprits.append(f"{line['fault']}, rank {line['me']}: {line['text']}")
                self.tally.epochs += worker is self.job.workers[0] and "connected" in line

    def note_usage(self) -> None:
        """Measures the sidecars that have had time to make their buffers."""
        now = time.monotonic()
        for host, sidecar in enumerate(self.job.sidecars):
            if sidecar.is_alive and now - sidecar.started > WARM_S:
                used = usage(sidecar.pid)
                growth = self._growths.setdefault(sidecar.pid, Growth(host, now, used, used))
                growth.last, growth.seconds = used, now - growth.began

    def growths(self) -> list[Growth]:
        """All sidecars that were measured twice. A job that is started again has new ones."""
        return [growth for growth in self._growths.values() if growth.seconds > 0]

    def new_events(self) -> list[str]:
        """Hangs, wrong elements and wrong culprits since the last time."""
        kinds = (self.tally.hangs, self.tally.wrong_culprits, self.tally.wrong_elements)
        new = [text for texts, shown in zip(kinds, self._shown) for text in texts[shown:]]
        self._shown = [len(texts) for texts in kinds]
        return new

    def totals(self) -> dict[str, int]:
        """The totals of all workers."""
        workers = [*self.job.past, *self.job.workers]
        return {key: sum(last(worker, key) for worker in workers) for key in ("operations", "elements", "wrong")}

    def _await_notice(self, name: str, began: float, culprit: Culprit) -> None:
        """Waits until all ranks that live have seen the end of the epoch."""
        gone = {culprit.rank} if culprit.rank is not None else set(self.job.served(culprit.sidecar or 0))
        others = [rank for rank in range(len(self.job.workers)) if rank not in gone]
        end = time.monotonic() + NOTICE_S
        while time.monotonic() < end:
            others = [rank for rank in others if not _failures(self.job.workers[rank], began)]
            if not others:
                return
            time.sleep(POLL_S)
        self.tally.hangs.append(f"{name}: ranks {others} have not seen the end within {NOTICE_S:.0f} s")

    def _check_culprit(self, name: str, began: float, culprit: Culprit) -> None:
        """Each failure of each rank names the culprit."""
        for rank, worker in enumerate(self.job.workers):
            failures = _failures(worker, began)
            is_served = culprit.sidecar == self.job.placement[rank]
            for line in failures:
                if not _names(line, culprit, is_served):
                    self.tally.wrong_culprits.append(f"{name} ({culprit}): rank {rank} reports {line}")

    def _check_the_others(self, name: str, began: float, expected: Expected) -> None:
        """Nobody has failed, or for the excuse: one failure gives the reason, and all name the sidecar or its ranks."""
        if isinstance(expected, Culprit):
            return
        if expected is None:
            self.check_nobody_failed(name, began)
            return
        served = self.job.served(expected.sidecar)
        failures = [(rank, line["text"]) for rank, w in enumerate(self.job.workers) for line in _failures(w, began)]
        reasons = [(rank, text) for rank, text in failures if any(reason in text for reason in expected.texts)]
        culprits = [f"sidecar {expected.sidecar}", *(f"rank {rank}" for rank in served)] if reasons else []
        for rank, text in failures:
            is_own = rank in served and (rank, text) in reasons
            if not is_own and not any(re.search(rf"\b{culprit}\b", text) for culprit in culprits):
                self.tally.wrong_culprits.append(f"{name}: rank {rank} names none of {culprits}: {text}")

    def check_nobody_failed(self, name: str, began: float) -> None:
        """Counts ranks whose session has failed since a time."""
        for rank, worker in enumerate(self.job.workers):
            for line in _failures(worker, began)[:1]:
                self.tally.wrong_culprits.append(f"{name}: nobody had to fail, but rank {rank} did: {line['text']}")


def _has_worked(worker: Process, since: float) -> bool:
    reports = [line["at"] for line in worker.lines[-50:] if "operations" in line]
    return bool(reports) and reports[-1] > since


def _failures(worker: Process, since: float) -> list[dict[str, Any]]:
    return [line for line in list(worker.lines) if "failed" in line and line["at"] >= since]


def _names(line: dict[str, Any], culprit: Culprit, is_served: bool) -> bool:
    if culprit.rank is not None:
        return bool(line["rank"] == culprit.rank)
    # The workers of a sidecar that has died see that their own connection has ended.
    return is_served or line["sidecar"] == culprit.sidecar
