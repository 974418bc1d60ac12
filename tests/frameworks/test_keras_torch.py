"""ronde.keras on Keras' back end PyTorch."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
# It is not imported: by default it imports TensorFlow, which this environment lacks.
if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

if TYPE_CHECKING:
    from conftest import Job


@pytest.mark.parametrize("ranks", [2, 3])
def test_keras_3_on_pytorch(job: Job, ranks: int) -> None:
    output = job("keras_training.py", ranks, "horovod.keras", KERAS_BACKEND="torch")
    assert output.count("trains as one process") == ranks
