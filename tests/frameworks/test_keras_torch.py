"""ronde.keras on Keras' back end PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")

if TYPE_CHECKING:
    from conftest import Job


@pytest.mark.parametrize("ranks", [2, 3])
def test_keras_3_on_pytorch(job: Job, ranks: int) -> None:
    output = job("keras_training.py", ranks, "horovod.keras", KERAS_BACKEND="torch")
    assert output.count("trains as one process") == ranks
