"""Collectives on GPUs in two levels, in worlds of real workers on the software device of `tests/device`.

Each worker has a device of its own. The device's NCCL is that of the tests: it waits for ever where NCCL's kernels do.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Callable

import pytest

World = Callable[..., str]
# Ranks and sidecars: a host with three GPUs, and two hosts with two.
WORLDS = [(3, 1), (4, 2)]


@pytest.mark.parametrize("ring", ["0", "1"])
@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_results_in_two_levels(world: World, levels: pytest.MonkeyPatch, ranks: int, sidecars: int, ring: str) -> None:
    levels.setenv("RONDE_RING", ring)
    assert world("gpu_levels.py", ranks, sidecars).count("levels hold") == ranks


def test_tickets_that_are_no_small_operations(world: World, levels: pytest.MonkeyPatch) -> None:
    """Without the eager path their contributions travel as chunks, and are complete later."""
    output = world("gpu_levels.py", 4, 2, options=("--eager-bytes", "0"))
    assert output.count("levels hold") == 4


def test_the_order_of_streams(world: World, levels: pytest.MonkeyPatch) -> None:
    assert world("gpu_order.py", 2, 1).count("order holds") == 2


def test_pytorch_in_two_levels(world: World, levels: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    assert world("gpu_torch.py", 2, 1).count("stand-ins hold") == 2


@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_a_failure_of_nccl_is_an_error_on_all_ranks(
    world: World, levels: pytest.MonkeyPatch, ranks: int, sidecars: int
) -> None:
    output = world("gpu_levels_failures.py", ranks, sidecars, "aborted")
    assert output.count("ncclInternalError") >= 2, output
    assert output.count("second: ") == output.count("third: ") == ranks, output
    assert output.count("the session is closed") == ranks, output


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("missing", "the request of rank 1 for tensor allreduce.second of process set 0 was withdrawn"),
        ("dropped", "the request of rank 0 for tensor allreduce.second of process set 0 was withdrawn"),
        ("out_of_memory", "the GPU is out of memory: cuMemAlloc failed"),
        ("other_device", ""),
    ],
)
def test_what_fails_before_nccl_leaves_two_levels_usable(
    world: World, levels: pytest.MonkeyPatch, case: str, named: str
) -> None:
    output = world("gpu_levels_failures.py", 3, 1, case)
    assert output.count("the session is closed") == 3, output
    assert named in output, output


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_handle_dropped_after_the_ticket_leaves_the_others_their_result(
    world: World, levels: pytest.MonkeyPatch, ranks: int
) -> None:
    output = world("gpu_levels_failures.py", ranks, 1, "withdrawn_late")
    assert output.count("third: it has the result") == ranks - 1, output
    assert output.count("the session is closed") == ranks, output


def test_a_rank_whose_set_has_failed_notifies_the_other_hosts(world: World, levels: pytest.MonkeyPatch) -> None:
    output = world("gpu_levels_failures.py", 4, 2, "failed_before_ticket", options=("--peer-timeout", "30"))
    assert output.count("the others are notified") == 4, output


@pytest.mark.parametrize("ring", ["0", "1"])
@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_an_operation_under_way_is_completed_when_a_rank_shuts_down(
    world: World, levels: pytest.MonkeyPatch, ranks: int, sidecars: int, ring: str
) -> None:
    levels.setenv("RONDE_RING", ring)
    output = world("gpu_levels_failures.py", ranks, sidecars, "shut_down")
    assert output.count("second: it has the result") == ranks, output
    assert output.count("third: ronde has been shut down: rank 0 ") == 1, output


@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_a_rank_that_shuts_down_before_its_own_part_fails_the_others(
    world: World, levels: pytest.MonkeyPatch, ranks: int, sidecars: int
) -> None:
    output = world("gpu_levels_failures.py", ranks, sidecars, "shut_down_early", options=("--peer-timeout", "40"))
    assert output.count("second: ronde has been shut down: rank 0 ") == ranks // sidecars - 1, output
    assert output.count("the session is closed") == ranks, output


@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_a_group_may_have_some_tensors_in_one_level(
    world: World, levels: pytest.MonkeyPatch, ranks: int, sidecars: int
) -> None:
    output = world("gpu_levels_failures.py", ranks, sidecars, "grouped")
    assert output.count("the session is closed") == ranks, output


def test_a_rank_that_does_not_submit_is_named(world: World, levels: pytest.MonkeyPatch) -> None:
    """The ticket is an operation like others, so the sidecar reports the rank for which it waits."""
    options = ("--stall-check-warning-time-seconds", "1")
    output = world("gpu_levels_failures.py", 3, 1, "missing", options=options)
    found = [line for line in output.splitlines() if "allreduce.second" in line and "rank 0" in line]
    assert found, output


@pytest.mark.parametrize(("choice", "is_named"), [("2", True), ("auto", False)])
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("RONDE_DEVICE_NCCL_VERSION", "21703", "libnccl.so.2 is of version 2.17.3"),
        ("SAME_GPU", "1", "rank 0 and rank 1 use the same GPU, 0000:01:00.0"),
        ("RONDE_NCCL_LIBRARY", "/nowhere", "libnccl.so.2 cannot be opened (tried /nowhere)"),
    ],
)
def test_ranks_that_cannot_use_nccl(
    world: World, levels: pytest.MonkeyPatch, choice: str, is_named: bool, variable: str, value: str, reason: str
) -> None:
    levels.setenv("RONDE_GPU_LEVELS", choice)
    levels.setenv(variable, value)
    output = world("gpu_levels_failures.py", 2, 1, "unable")
    assert output.count("the session is closed") == 2, output
    assert output.count("device: two levels cannot be used, which RONDE_GPU_LEVELS=2 demands: ") == 4 * is_named
    raised = [line for line in output.splitlines() if "WARNING:ronde:" not in line]
    assert any(reason in line for line in raised) == is_named, output


def test_a_new_session_makes_new_communicators(world: World, levels: pytest.MonkeyPatch) -> None:
    assert world("gpu_levels_again.py", 2, 1).count("two sessions hold") == 2


def asked(program: str) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_the_version_of_nccl_is_that_of_two_levels(levels: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    program = "import ronde.torch as hvd; print(hvd.nccl_built())"
    table = "from horovod.runner import check_build; print(check_build.table())"
    assert asked(program) == "22304"
    assert "[X] NCCL" in asked(table)
    levels.setenv("RONDE_DEVICE_NCCL_VERSION", "21703")
    assert asked(program) == "0"
    assert "[ ] NCCL" in asked(table)
    levels.delenv("RONDE_DEVICE_NCCL_VERSION")
    levels.setenv("RONDE_GPU_LEVELS", "1")
    assert asked(program) == "0"


def test_two_levels_need_rondes_copies(levels: pytest.MonkeyPatch) -> None:
    levels.setenv("RONDE_GPU_STAGING", "torch")
    program = "from ronde import device\ntry: device.staging_choice()\nexcept ValueError as error: print(error)"
    assert asked(program) == "RONDE_GPU_LEVELS=2 needs RONDE_GPU_STAGING=ronde; set both, or neither"
