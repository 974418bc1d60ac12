"""The search for settings in a real job comes near the best point of a grid: `make heavy-test`, which runs it alone."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest

from tuning.__main__ import GRID, MIB, START, Point, compared

TESTS = pathlib.Path(__file__).parents[1]
# A run takes some two minutes on two cores.
PATIENCE_S = 600
SLOW, BEST, FOUND = GRID[5], GRID[11], Point(32 * MIB, 64 << 10)


@pytest.mark.heavy
def test_sixty_samples_from_a_wrong_start_reach_nine_tenths_of_the_best_point() -> None:
    """From 1 MB and chunks of 4 KiB. The grid has 16 and 64 MiB, with the chunk sizes that are good on one machine."""
    if not os.environ.get("RONDE_BIN"):
        pytest.skip("RONDE_BIN does not name the binary `ronde`; run the test by `make heavy-test`")
    options = ["--samples", "60", "--rounds", "3", "--grid", "6"]
    status, output = run_group([sys.executable, "-m", "tuning", *options], PATIENCE_S)
    assert status == 0, output
    assert "(start) | " in output, output


def run_group(command: list[str], timeout_s: float, pass_fds: tuple[int, ...] = ()) -> tuple[int, str]:
    """Runs a command in its own session; returns its status and output. A timeout kills its jobs, too."""
    process = subprocess.Popen(
        command,
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        pass_fds=pass_fds,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, output


def test_a_run_that_takes_too_long_is_killed_with_its_children() -> None:
    """All of them inherit the end of a pipe, which is closed with the last of them."""
    reads, writes = os.pipe()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            run_group(["sh", "-c", "sleep 300 & wait"], 0.5, (writes,))
    finally:
        os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        assert select.select([pipe], [], [], 60)[0], "a child still runs"
        assert pipe.read() == b""


class Rates:
    """Rates that points have in turn, the last one from then on."""

    def __init__(self, rates: dict[Point, list[float]]) -> None:
        self.rates = rates
        self.measured: list[Point] = []

    def __call__(self, point: Point) -> float:
        """The next rate of a point."""
        turn = self.measured.count(point)
        self.measured.append(point)
        return self.rates[point][min(turn, len(self.rates[point]) - 1)]


def test_what_was_found_is_compared_with_the_best_point_by_medians() -> None:
    """A single sample that is far off changes nothing."""
    rates = Rates({START: [1, 1, 50], SLOW: [5], BEST: [10, 0.1, 10], FOUND: [9.5, 9.5, 0.1]})
    assert compared(FOUND, [SLOW, BEST], 3, rates) == pytest.approx(0.95)
    assert rates.measured == [START, SLOW, BEST, FOUND] * 3


def test_a_ratio_that_is_too_low_is_measured_once_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Only what was found and the best point are: what else the machine did may be over."""
    rates = Rates({START: [1], SLOW: [5], BEST: [20, 20, 20, 10], FOUND: [9.5]})
    assert compared(FOUND, [SLOW, BEST], 3, rates) == pytest.approx(0.95)
    assert rates.measured[12:] == [BEST, FOUND] * 3
    assert "reached: 0.47 of the best point; both are measured again" in capsys.readouterr().out
    slow = Rates({START: [1], SLOW: [5], BEST: [10], FOUND: [5]})
    assert compared(FOUND, [SLOW, BEST], 3, slow) == pytest.approx(0.5)
    assert len(slow.measured) == 18
