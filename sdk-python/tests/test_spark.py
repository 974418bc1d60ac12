"""A smoke test of `ronde.spark`, where the environment with Spark exists: `make spark-test` makes it, and runs all."""

from __future__ import annotations

from engines import check_first_test


def test_functions_run_in_tasks_of_spark() -> None:
    check_first_test("spark", "test_run.py", "each_rank_returns")
