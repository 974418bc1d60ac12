"""Runs a benchmark: one world after another, each with one group of ranks for every backend."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import time
from typing import TYPE_CHECKING, Any

from ronde.bench import groups, machine, processes
from ronde.bench.errors import UsageError
from ronde.bench.groups import LABELS, Group
from ronde.bench.measure import measure_case, turns, variants
from ronde.bench.named import Extras
from ronde.bench.network import Network
from ronde.bench.progress import Progress
from ronde.bench.train import Training, measure_training
from ronde.bench.training_modes import MODES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ronde.bench.cases import Case, World

SCHEMA = "ronde-bench/1"
IDLE_SECONDS = 2.0
# Copies of a tensor that all backends together hold at one rank: inputs, results, segments, libraries' buffers.
COPIES_OF_A_TENSOR = 12
MEMORY_SHARE_MOST = 0.8


class Run:
    """A running benchmark and its report."""

    def __init__(self, kind: str, seed: int, options: dict[str, Any], extras: Extras, gbit: float | None) -> None:
        self.seed = seed
        self._extras = extras
        self.gbit = gbit
        self._progress: Progress | None = None
        self.report: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": kind,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seed": seed,
            "options": options,
            "machine": machine.describe(),
            "notes": [],
            "worlds": [],
        }
        self.report["notes"] += machine.warnings(self.report["machine"])

    def measure(
        self, worlds: Sequence[World], cases: Sequence[Case], peers: Sequence[str], training: Training | None
    ) -> dict[str, Any]:
        """Measures the cases, and training if given, in each world. Returns the report."""
        compared = ["ronde", *peers]
        # Training has modes of its own, whose groups measure no case that they were not asked for.
        trained = [] if training is None else [name for name in MODES if name not in compared]
        self._progress = Progress(sum(self._turns(world, cases, compared, training) for world in worlds))
        for note in self.report["notes"]:
            self._progress.print_note(f"warning: {note}")
        try:
            for world in worlds:
                self.report["worlds"].append(self._world(world, cases, compared, trained, training))
        finally:
            self._progress.close()
        self.report["machine"]["load_average_after"] = list(os.getloadavg())
        return self.report

    def _world(
        self,
        world: World,
        cases: Sequence[Case],
        compared: Sequence[str],
        trained: Sequence[str],
        training: Training | None,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"hosts": world.hosts, "ranks": world.ranks, "backends": {}, "missing": {}, "cases": []}
        if training is not None and world.hosts > training.hosts_most:
            training = None
        backends = compared if training is None else [*compared, *trained]
        with self._groups(world, backends, found, max((case.nbytes for case in cases), default=0)) as ready:
            of_cases = [group for group in ready if group.name in compared]
            for case in cases:
                self._case(world, case, of_cases, found)
            if training is not None:
                self._part(f"{world.title()}: training {training.model}")
                trainers = [group for group in ready if group.name in MODES]
                found["training"] = measure_training(training, trainers, self.seed, self._shown())
        return found

    def _case(self, world: World, case: Case, ready: Sequence[Group], found: dict[str, Any]) -> None:
        self._part(f"{world.title()}: {case.title()}")
        needed = case.nbytes * world.ranks * COPIES_OF_A_TENSOR
        available = int(machine.memory_available_bytes() * MEMORY_SHARE_MOST)
        if needed > available:
            note = (
                f"{world.title()}: {case.title()} is skipped: it may take {needed >> 20} MB, and {available >> 20} MB"
            )
            self._note(f"{note} are there for it")
            return
        found["cases"].append(measure_case(case, ready, self.seed, self._shown()))

    @contextlib.contextmanager
    def _groups(
        self, world: World, backends: Sequence[str], found: dict[str, Any], largest_bytes: int
    ) -> Iterator[list[Group]]:
        """Yields the groups of a world, ready, and adds their properties to `found`."""
        self._part(f"{world.title()}: starting")
        with contextlib.ExitStack() as stack:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ronde-bench-")))
            network = None
            if world.hosts > 1:
                network = stack.enter_context(contextlib.closing(Network(world.hosts, folder, self.gbit)))
            ready = []
            for name in backends:
                if reason := groups.why_not(name, world):
                    found["missing"][name] = reason
                    self._note(f"{world.title()}: {LABELS[name]} is skipped: {reason}")
                    continue
                group = groups.start(name, world, network, folder, largest_bytes, self._extras)
                ready.append(stack.enter_context(contextlib.closing(group)))
            for group in list(ready):
                group.wait_until_ready()
            others = _OtherWork(ready)
            found["backends"] = _idle(ready)
            yield ready
            found["other_work_cores"] = others.cores()

    def _turns(self, world: World, cases: Sequence[Case], compared: Sequence[str], training: Training | None) -> int:
        """Returns the number of turns of a world."""
        there = [name for name in compared if groups.why_not(name, world) is None]
        steps = training.turns() if training is not None and world.hosts <= training.hosts_most else 0
        counts = [sum(variants(name, case, self._extras) for name in there) for case in cases]
        return steps + sum(map(turns, cases, counts))

    def _part(self, title: str) -> None:
        self._shown().part(title)

    def _note(self, text: str) -> None:
        self.report["notes"].append(text)
        self._shown().print_note(text)

    def _shown(self) -> Progress:
        assert self._progress is not None  # `measure` makes it
        return self._progress


class _OtherWork:
    """Measures other work of the machine, from its construction on."""

    def __init__(self, ready: Sequence[Group]) -> None:
        self._processes = set().union(*(group.processes for group in ready), {os.getpid()})
        self._start = self._now()

    def cores(self) -> float:
        """Returns the average number of cores busy with other work."""
        wall, busy, own = (now - start for now, start in zip(self._now(), self._start))
        return max(0.0, (busy - own) / wall)

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), processes.busy_seconds(), processes.cpu_seconds(self._processes)


def _idle(ready: Sequence[Group]) -> dict[str, Any]:
    """Returns the CPU use of idle groups, in shares of one core."""
    watched = {group.name: (group, group.sidecars()) for group in ready}
    before = {name: (group.cpu_seconds(), processes.cpu_seconds(cars)) for name, (group, cars) in watched.items()}
    time.sleep(IDLE_SECONDS)
    found = {}
    for name, (group, cars) in watched.items():
        whole, sidecars = before[name]
        found[name] = {"versions": group.versions, "idle_cores": (group.cpu_seconds() - whole) / IDLE_SECONDS}
        if cars:
            used = processes.cpu_seconds(cars) - sidecars
            found[name]["idle_cores_of_a_sidecar"] = used / IDLE_SECONDS / len(cars)
    return found


def why_no_hosts() -> str | None:
    """Returns why worlds of several hosts are impossible, or None."""
    return Network.why_not()


def check_world(world: World) -> None:
    """Raises UsageError for an impossible world."""
    if world.ranks % world.hosts:
        raise UsageError(f"{world.ranks} ranks cannot be divided evenly among {world.hosts} hosts")
