"""Jobs of several sidecars with `--gpu`, on the software device: NCCL within a host, ronde between hosts.

All sidecars are on this host, with GPUs 0 to 2 each. The device shows order, failures and lifetimes; no figure is taken
from it.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Callable

import pytest
from conftest import PACKAGE, WORKERS, gpu_pages, ronde_binary

World = Callable[..., str]


@pytest.mark.parametrize(
    ("ranks", "options"), [(4, ()), (5, ()), (4, ("--eager-bytes", "0")), (4, ("--arena-mb", "64", "--lanes", "2"))]
)
def test_results_are_those_of_one_process(
    world: World, three_devices: None, ranks: int, options: Sequence[str]
) -> None:
    output = world("gpu_hosts.py", ranks, 2, options=["--gpu", *options])
    assert output.count("levels hold") == ranks
    both = gpu_pages(output)
    assert len(both) == 2, output
    for page in both:
        assert page["gpus"] == 3
        # How many tensors share an operation depends on the moment.
        assert page["two_level_operations"] > 50
        assert page["copied_operations"] > 0, "broadcasts, prescaled ones, and float16 averages"
        assert page["aborted"] == 0
    # Of the process set whose ranks are all on the first host.
    assert sorted(page["nccl_operations"] for page in both) == [0, 1]


def run(
    script: str, ranks: int, *arguments: str, options: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    job = [ronde_binary(), "run", "-np", str(ranks), "--sidecars", "2", "--gpu", *options]
    command = [*job, sys.executable, str(WORKERS / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment)


def test_the_log_has_each_reason_why_tensors_are_copied_once(three_devices: None) -> None:
    done = run("gpu_hosts.py", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    for reason, sidecars in [
        ("broadcasts are performed on the host", 2),
        ("NCCL does not scale as ronde does", 2),
        ("one rank of this host takes part", 2),
        ("a local rank has joined", 1),
        ("a sum of float16 may be too large where the average is not", 2),
    ]:
        assert done.stderr.count(reason) == sidecars, (reason, done.stderr)


def test_a_sidecar_that_is_killed_while_nccl_works_is_reported(three_devices: None) -> None:
    """The kernels of the second operation never end: on each host a GPU waits for one that NCCL did not enqueue."""
    options = ("--peer-timeout", "30")
    done = run("gpu_hosts_lost.py", 4, "sidecar", options=options, RONDE_DEVICE_FAIL="ncclReduceScatter=7@3")
    assert done.returncode != 0
    assert done.stdout.count("the session is closed") >= 2, done.stdout + done.stderr
    assert done.stdout.count("aborted") == 0, done.stdout + done.stderr
    (killed,) = re.findall(r"killed at ([\d.]+)", done.stdout)
    reported = [float(found) - float(killed) for found in re.findall(r"reported at ([\d.]+)", done.stdout)]
    # Not by the peer timeout. Usually it takes some 0.1 s.
    assert statistics.median(reported) < 5, reported


@pytest.mark.parametrize("function", ["ncclReduceScatter", "ncclAllGather"])
def test_a_failure_of_nccl_in_either_phase_is_an_error_of_all_ranks(three_devices: None, function: str) -> None:
    """On both hosts; the second operation of each calls it for the third time, after one call for each GPU."""
    done = run("gpu_shared_failing.py", 4, "hosts", RONDE_DEVICE_FAIL=f"{function}=3@3")
    assert done.stdout.count("the failure of the device is reported") == 4, done.stdout + done.stderr
