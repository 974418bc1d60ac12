"""The process of a rank, and its end after the function has returned. Without Spark."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
from ronde.cluster import supervised
from ronde.cluster.supervised import SupervisedRank
from ronde.run import Call, pickled


def leaves_a_thread(fails: bool) -> int:
    threading.Thread(target=lambda: time.sleep(3600)).start()
    return 7 // (not fails)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_does_not_exit_after_its_function_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: bool
) -> None:
    monkeypatch.setattr(supervised, "_EXIT_TIMEOUT_S", 0.5)
    given = pickled(Call(leaves_a_thread, (fails,), {}))
    rank = SupervisedRank(sys.executable, given, {**os.environ, "RONDE_RANK": "3"}, lambda name, line: None)
    try:
        outcome = rank.wait()
    finally:
        rank.end()
    if fails:
        assert outcome.failure is not None
        assert "ZeroDivisionError" in outcome.failure.text
    else:
        assert outcome.result is not None
    message = f"the function of rank 3 has ended, but its process {rank.pid} has not exited"
    assert message in capfd.readouterr().err
