"""A smoke test of `ronde.ray`, where the environment with Ray exists. `make ray-test` makes it, and runs all tests."""

from __future__ import annotations

from engines import check_first_test


def test_functions_run_on_workers_of_ray() -> None:
    check_first_test("ray", "test_executor.py", "each_rank_returns")
