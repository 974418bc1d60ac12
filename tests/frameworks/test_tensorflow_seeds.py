"""Programs for TensorFlow and Keras as Horovod's documentation shows them, on two ranks.

`seeds/` contains our own programs with the same calls in the same order. RONDE_SEEDS may name a folder with the
documentation itself, as text: its blocks of these kinds run as well, with the text that they have there.

They do not run in the environment that they have there: TensorFlow 2 and Keras 3 have removed names that they use.
docs/TENSORFLOW.md says what a script has to change. In place of that, these tests and `workers/tensorflow_seeds.py`

- set TF_USE_LEGACY_KERAS=1, so that `tf.keras` is Keras 2, which takes `experimental_run_tf_function=False`; only
  `keras_mnist`, which imports `keras`, runs with Keras 3;
- give `graph`, `adasum`, `elastic_graph`, `elastic_fit` and `keras_mnist` the module `tensorflow.compat.v1` under the
  name `tensorflow`, and `pin_graph`, `pin_keras` and `little_memory` under the name `tf`;
- give Keras 3 a `keras.backend.set_session` that does nothing, and a small random MNIST;
- replace `MonitoredTrainingSession` by one that ends after some runs;
- run on CPUs: on a host with GPUs Keras 3 compiles by XLA, which compiles no collectives.
"""

from __future__ import annotations

import os
import pathlib
import re
import textwrap
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("tf_keras")

if TYPE_CHECKING:
    from conftest import Job

OWN = pathlib.Path(__file__).parent / "seeds"
# Which words a block has that its kind consists of, and none of which others.
KINDS = {
    "graph": (["tf.train.MonitoredTrainingSession(", "hvd.BroadcastGlobalVariablesHook(0)"], []),
    "tape": (["def training_step(images, labels, first_batch)", "hvd.DistributedGradientTape(tape)"], []),
    "adasum": (["tf.train.AdamOptimizer", "op=hvd.AdaSum"], []),
    "elastic_graph": (["hvd.elastic.TensorFlowState("], []),
    "elastic_tape": (["hvd.elastic.TensorFlowKerasState("], []),
    "fit": (["import horovod.tensorflow.keras as hvd", "experimental_run_tf_function=False"], []),
    "elastic_fit": (["import horovod.tensorflow.keras as hvd", "hvd.elastic.KerasState("], []),
    "keras_mnist": (["from keras.datasets import mnist", "import horovod.keras as hvd"], []),
    "xla": (["HOROVOD_ENABLE_XLA_OPS", "@tf.function(jit_compile=True)"], []),
    "pin": (["tf.config.experimental.set_visible_devices("], ["import"]),
    "pin_graph": (["config.gpu_options.visible_device_list ="], ["import", "set_session"]),
    "pin_keras": (["K.set_session(tf.Session(config=config))"], ["import"]),
    "little_memory": (["with tf.Session(config=small_cfg):"], []),
    "mpi_size": (["assert hvd.mpi_threads_supported()", "import horovod.tensorflow as hvd"], []),
    "mpi_communicator": (["hvd.init(comm=subcomm)", "import horovod.tensorflow as hvd"], []),
}
# What blocks for MPI raise in a job that MPI's launcher has not started. mpi4py may not be there.
REFUSED = {
    "mpi_size": "ValueError: Horovod has not been built with MPI support, or mpirun has not started",
    "mpi_communicator": "(ValueError: MPI.COMM_WORLD has 1|ModuleNotFoundError: No module named 'mpi4py')",
}
# Estimators of Spark and their models; tests/spark has those.
ABOUT_OTHERS = ("horovod.spark", "KerasEstimator", "keras_model.getModel()", "util.prepare_data")


def run(job: Job, path: pathlib.Path) -> None:
    # `horovod.keras` is for Keras 3.
    variables = {} if path.stem == "keras_mnist" else {"TF_USE_LEGACY_KERAS": "1"}
    output = job("tensorflow_seeds.py", 2, str(path), **variables)
    outcome = REFUSED.get(path.stem, "ran")
    assert len(re.findall(rf"program {path.stem}: {outcome}", output)) == 2, output


def blocks(text: str) -> list[str]:
    """The blocks in Python of a page."""
    marked = re.findall(r"^( *)\.\. code-block:: python\n((?:\1 +.*\n|\s*\n)+)", text, re.MULTILINE)
    # The options of a block in reStructuredText are before its program.
    options = re.compile(r"(?m)\A(:[\w-]+:.*\n)+")
    return [options.sub("", textwrap.dedent(block).strip("\n")) + "\n" for _, block in marked]


def kinds_of(block: str) -> list[str]:
    return [
        kind
        for kind, (words, others) in KINDS.items()
        if all(word in block for word in words) and not any(word in block for word in others)
    ]


@pytest.fixture(scope="module")
def documentation() -> list[str]:
    """The blocks of the documentation."""
    named = os.environ.get("RONDE_SEEDS")
    if not named:
        pytest.skip("RONDE_SEEDS names no folder with the documentation")
    pages = [path.read_text(errors="replace") for path in sorted(pathlib.Path(named).glob("*.txt"))]
    return [block for page in pages for block in blocks(page)]


def test_each_block_about_tensorflow_is_of_one_kind(documentation: list[str]) -> None:
    about = re.compile(r"tensorflow|\btf\.|[Kk]eras")
    for block in documentation:
        if about.search(block) and not any(word in block for word in ABOUT_OTHERS):
            assert len(kinds_of(block)) == 1, f"{kinds_of(block)}:\n{block}"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_program_like_the_documentations_runs(job: Job, kind: str) -> None:
    run(job, OWN / f"{kind}.py")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_documentation_runs(job: Job, kind: str, documentation: list[str], tmp_path: pathlib.Path) -> None:
    found = [block for block in documentation if kind in kinds_of(block)]
    assert found, f"no block of the documentation is of the kind {kind}"
    # A method of a class that is not shown is indented by one column more than the line before it.
    text = re.sub(r"(?m)^ (?! *$)", "", found[0]) if kind == "xla" else found[0]
    (tmp_path / f"{kind}.py").write_text(text)
    run(job, tmp_path / f"{kind}.py")
