"""A worker that is killed in the middle of a collective of NCCL, on the software device of `tests/device`.

The others receive the loss, with its rank, within a second, which is a promise to programs and no figure of speed. The
heavy tests measure it. The other ones, beside which much else runs, check that the loss does not come by the peer
timeout, after which a silent rank is lost.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence

import pytest
from conftest import PACKAGE, WORKERS, ronde_binary

KILLS = 5
# The median over all survivors of all kills.
REPORTED_WITHIN_S = 1.0
PEER_TIMEOUT_S = 30
LIMITS = pytest.mark.parametrize(
    "limit_s", [PEER_TIMEOUT_S / 2, pytest.param(REPORTED_WITHIN_S, marks=[pytest.mark.heavy, pytest.mark.measured])]
)


def times_until_reported(script: str, what: str, ranks: int, options: Sequence[str]) -> list[float]:
    """Runs a job in which the last rank is killed. Returns the seconds until each other rank has received its loss.

    All processes are on this machine, so their monotonic clocks are one.
    """
    job = [ronde_binary(), "run", "-np", str(ranks), "--peer-timeout", str(PEER_TIMEOUT_S), *options]
    command = [*job, sys.executable, str(WORKERS / script), what]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment)
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert done.stdout.count(f"rank {ranks - 1} is lost") == ranks - 1, output
    assert done.stdout.count("communicators are aborted") > 0, output
    assert done.stdout.count("the session is closed") == ranks - 1, output
    (killed,) = re.findall(r"killed at ([\d.]+)", done.stdout)
    reported = re.findall(r"reported at ([\d.]+)", done.stdout)
    assert len(reported) == ranks - 1, output
    return [float(found) - float(killed) for found in reported]


def check_times(script: str, what: str, ranks: int, limit_s: float, options: Sequence[str]) -> None:
    """Repeats the kill, and checks the median."""
    runs = [times_until_reported(script, what, ranks, options) for _ in range(KILLS)]
    assert statistics.median(itertools.chain.from_iterable(runs)) < limit_s, runs


@LIMITS
@pytest.mark.parametrize(("ranks", "sidecars"), [(3, 1), (4, 2)])
def test_nccl_in_the_workers(levels: pytest.MonkeyPatch, ranks: int, sidecars: int, limit_s: float) -> None:
    """The worker is killed when NCCL's kernels of its host wait for it."""
    options = ("--sidecars", str(sidecars))
    check_times("gpu_levels_failures.py", "killed", ranks, limit_s, options)


@LIMITS
@pytest.mark.parametrize(
    ("ranks", "sidecars", "never_enqueued"),
    [(3, 1, "ncclAllReduce=7@4"), (4, 2, "ncclReduceScatter=7@3")],
)
def test_nccl_in_the_sidecars(
    three_devices: None,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    sidecars: int,
    never_enqueued: str,
    limit_s: float,
) -> None:
    """The worker is killed while an operation is in NCCL, which waits for a call that it did not enqueue."""
    monkeypatch.setenv("RONDE_DEVICE_FAIL", never_enqueued)
    options = ("--gpu", "--sidecars", str(sidecars))
    check_times("gpu_hosts_lost.py", "worker", ranks, limit_s, options)
