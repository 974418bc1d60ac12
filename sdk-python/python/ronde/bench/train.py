"""Measures training steps of a world. Training modes take turns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ronde.bench.cases import TRAIN_STEPS
from ronde.bench.errors import WrongResultError
from ronde.bench.measure import NANOSECONDS
from ronde.bench.summary import Summary, slowest
from ronde.bench.training_modes import ALONE, CODEC, MODES, is_synchronous, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.bench.groups import Group
    from ronde.bench.progress import Progress

FIRST_CHECK = 1_000_000


@dataclasses.dataclass(frozen=True)
class Training:
    """The parameters of a training run.

    batch      -- samples per rank and step
    rounds     -- turns of each mode
    hosts_most -- worlds of more hosts skip training
    codecs     -- codecs of additional modes of ronde, as on the command line
    """

    model: str
    batch: int
    rounds: int
    hosts_most: int
    codecs: tuple[str, ...] = ()

    def modes(self, group: str) -> list[str]:
        """Returns the training modes of a group of ranks."""
        return MODES[group] + ([CODEC + codec for codec in self.codecs] if group == "ronde" else [])

    def turns(self) -> int:
        """Returns the turns of all modes together."""
        return self.rounds * sum(len(self.modes(group)) for group in MODES)


def measure_training(training: Training, groups: Sequence[Group], seed: int, progress: Progress) -> dict[str, Any]:
    """Measures all training modes in one world. Returns the report's entry. Raises WrongResultError."""
    all_series = []
    for group in groups:
        modes = training.modes(group.name)
        group.ask("train_open", model=training.model, batch=training.batch, seed=seed, modes=modes)
        all_series += [_Series(group, mode) for mode in modes]
    for series in all_series:
        series.check(training)
    for turn in range(training.rounds):
        for series in all_series:
            series.measure(turn * TRAIN_STEPS)
            progress.turn()
    for series in all_series:
        series.compare_ranks(training)
    parameters = all_series[0].ask("train_parameters")[0]["parameters"]
    entries = [series.entry(training) for series in all_series]
    for group in groups:
        group.ask("close")
    return {"model": training.model, "batch": training.batch, "parameters": parameters, "entries": entries}


class _Series:
    """One training mode and its samples."""

    def __init__(self, group: Group, mode: str) -> None:
        self.group = group
        self.mode = mode
        self.ranks = 1 if mode == ALONE else group.ranks
        self.times: list[int] = []
        self.cpu: list[float] = []
        self.sent_bytes: list[float] = []

    def ask(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        return self.group.ask(what, self.ranks, mode=self.mode, **arguments)

    def check(self, training: Training) -> None:
        """Compares the gradients of one step with their mean, computed on one rank."""
        for rank, answer in enumerate(self.ask("train_check", step=FIRST_CHECK)):
            if wrong := answer.get("wrong"):
                raise WrongResultError(
                    f"{label(self.mode)} gave a wrong gradient: {training.model}, {self.ranks} ranks, rank {rank}, "
                    f"parameter {wrong['parameter']}, element {wrong['element']}: {wrong['got']!r} instead of "
                    f"{wrong['expected']!r}"
                )

    def measure(self, first: int) -> None:
        # One more step than timed ones.
        steps = TRAIN_STEPS + 1
        before, sent_before = self.group.cpu_seconds(), self.group.sent_bytes()
        answers = self.ask("train_steps", first=first, steps=TRAIN_STEPS)
        self.cpu.append((self.group.cpu_seconds() - before) / steps)
        sent = self.group.sent_bytes()
        if sent is not None and sent_before is not None:
            self.sent_bytes.append((sent - sent_before) / steps)
        self.times += slowest([answer["nanoseconds"] for answer in answers])

    def compare_ranks(self, training: Training) -> None:
        """Checks that all ranks have the same parameters after the last step, bit by bit."""
        digests = [answer["digest"] for answer in self.ask("train_digest")]
        if is_synchronous(self.mode) and len(set(digests)) != 1:
            raise WrongResultError(f"after training {training.model} by {label(self.mode)} the ranks' weights differ")

    def entry(self, training: Training) -> dict[str, Any]:
        """Returns the report's entry, with times in seconds."""
        seconds = Summary.of([time * NANOSECONDS for time in self.times])
        return {
            "way": self.mode,
            "ranks": self.ranks,
            "seconds": dataclasses.asdict(seconds),
            "samples_per_second": self.ranks * training.batch / seconds.median,
            "cpu_seconds_per_step": Summary.of(self.cpu).median,
            "sent_bytes_per_step": Summary.of(self.sent_bytes).median if self.sent_bytes else None,
        }
