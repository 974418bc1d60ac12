"""Runs examples that train on digits, and compares their weights."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from installed_wheel import PACKAGE, describe_wheel, of_job

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = PACKAGE.parent / "examples"
WATCHED = pathlib.Path(__file__).parent / "workers" / "watched.py"
JOB_ALONE = WATCHED.with_name("job_alone.py")
# Trainings are compared in float64: in float32, training amplifies the rounding of other partial sums to 0.06.
DTYPE = {"DIGITS_DTYPE": "float64"}
# They are about 1e-15 apart; one that trains on half of each batch is 0.4 off.
DISTANCE_MAX = 1e-9


@dataclasses.dataclass
class Run:
    """What a training left.

    accuracies, digests -- one for each rank
    listeners           -- the number of TCP ports on which each rank listened at any time
    weights             -- those of rank 0
    """

    accuracies: list[float]
    digests: list[str]
    listeners: list[int]
    weights: dict[str, torch.Tensor]

    def distance(self, other: Run) -> float:
        """Returns the norm of the difference of the weights, in units of the weights' own norm."""
        mine, others = (
            torch.cat([run.weights[name].flatten() for name in sorted(run.weights)]) for run in (self, other)
        )
        return float((mine - others).norm() / mine.norm())


class Runner:
    """Runs programs, and finds what they print.

    binary  -- the path of `ronde`
    folder  -- for its files
    timeout -- seconds after which a run is ended
    """

    def __init__(self, binary: str, folder: pathlib.Path, timeout: float) -> None:
        self.binary = binary
        self.metadata = describe_wheel(folder)
        self.timeout = timeout
        self._weights = folder / "weights.pt"

    def job(self, ranks: int, program: str, *arguments: str, sidecars: int = 1, **variables: str) -> Run:
        """Runs an example unchanged as a job, and watches its sockets. Fails if it fails or ranks' weights differ."""
        command = [str(WATCHED), str(EXAMPLES / program), *arguments]
        run = self.launched(ranks, command, sidecars=sidecars, **variables)
        assert len(run.listeners) == ranks
        return run

    def launched(self, ranks: int, command: Sequence[str], sidecars: int = 1, **variables: str) -> Run:
        """Runs a Python program and its arguments as a job, which reports as the examples do."""
        options = of_job(self.metadata, DIGITS_WEIGHTS=str(self._weights), **DTYPE, **variables)
        job = [self.binary, "run", "-np", str(ranks), "--sidecars", str(sidecars), "--start-timeout", "120"]
        run = self._run([*job, *options, sys.executable, *command], {})
        assert len(run.digests) == ranks
        assert len(set(run.digests)) == 1, run.digests
        return run

    def by_other_launcher(self, command: Sequence[str], **variables: str) -> Run:
        """Runs a Python program that starts the ranks itself. Whether all of them have trained is for the caller."""
        path = f"{PACKAGE}:{self.metadata}"
        variables = {"PYTHONPATH": path, "DIGITS_WEIGHTS": str(self._weights), "RONDE_BIN": self.binary, **variables}
        return self._run([sys.executable, *command], variables)

    def alone(self, program: str, *arguments: str) -> Run:
        """Runs an example as a single process without a launcher."""
        variables = {"PYTHONPATH": f"{PACKAGE}:{self.metadata}", "DIGITS_WEIGHTS": str(self._weights)}
        return self._run([sys.executable, str(EXAMPLES / program), *arguments], variables)

    def _run(self, command: list[str], variables: dict[str, str]) -> Run:
        self._weights.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **DTYPE, **variables}
        done = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=self.timeout
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        found = re.findall(r"rank \d+ of \d+: test accuracy ([\d.]+), weights ([0-9a-f]+)", done.stdout)
        listeners = re.findall(r"watched in [1-9]\d* rounds: (\d+) TCP listeners", done.stdout)
        weights = torch.load(self._weights, weights_only=True)
        accuracies, digests = [float(accuracy) for accuracy, _ in found], [digest for _, digest in found]
        return Run(accuracies, digests, [int(number) for number in listeners], weights)


def check_same_training(many: Run, one: Run) -> None:
    """Checks that ranks trained on shares of the same batches as one process, without a TCP listener."""
    assert min(many.accuracies) > 0.85, many.accuracies
    distance = many.distance(one)
    assert distance < DISTANCE_MAX, distance
    assert set(many.listeners) <= {0}, f"ranks listened on {many.listeners} TCP ports"
