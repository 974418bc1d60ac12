"""ronde.keras on Keras' back end JAX."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("jax")
# It is not imported: by default it imports TensorFlow, which this environment lacks.
if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)

if TYPE_CHECKING:
    from conftest import Job

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("ranks", [2, 3])
def test_keras_3_on_jax(job: Job, ranks: int) -> None:
    output = job("keras_training.py", ranks, "horovod.keras", KERAS_BACKEND="jax")
    assert output.count("trains as one process") == ranks


def test_a_job_that_continues_is_refused(job: Job) -> None:
    """Before training: `fit` would go on with the shares of the ranks before a loss."""
    options = ["--min-np", "1", "--max-np", "2"]
    output = job(
        "keras_elastic_jax.py", 2, options=options, fails=True, KERAS_BACKEND="jax", RONDE_ON_FAILURE="continue"
    )
    assert "hvd.elastic.run restores the last commit instead" in output, output


def test_an_elastic_fit_survives_the_loss_of_a_worker(job: Job) -> None:
    options = ["--min-np", "1", "--max-np", "2"]
    output = job("keras_elastic_jax.py", 2, options=options, KERAS_BACKEND="jax")
    assert "rank 0: continued from the commit" in output, output


def test_an_interrupted_fit_continues_with_its_weights_where_the_optimizer_averages_them(job: Job) -> None:
    output = job("keras_interrupted.py", 2, KERAS_BACKEND="jax")
    assert output.count("continued with its weights") == 2, output
