"""Which GPU a rank uses: without GPUs, by the numbers that Spark would give."""

from __future__ import annotations

import pytest
from ronde.spark.common.devices import check_alike, cuda_device


def test_a_rank_uses_sparks_gpu_or_that_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_device(3, 2) == 1
    monkeypatch.setenv("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "1")
    monkeypatch.setenv("RONDE_LOCAL_RANK", "2")
    assert cuda_device(0, 4) == 2
    # Spark has hidden the others.
    assert cuda_device(0, 1) == 0
    with pytest.raises(ValueError, match=r"GPU '2', but this process sees GPUs 0 to 1"):
        cuda_device(0, 2)


def test_ranks_with_and_without_a_gpu_are_refused() -> None:
    check_alike([1, 1])
    check_alike([0, 0, 0])
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have a GPU and ranks \[0, 2\] do not"):
        check_alike([0, 1, 0])
