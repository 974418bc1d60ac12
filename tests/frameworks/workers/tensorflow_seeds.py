"""Run by every rank: a program of the documentation of Horovod, with the names that it assumes.

    tensorflow_seeds.py FILE

`NAME = ...` in it represents what a reader has. Programs for TensorFlow 1 get its names from `tensorflow.compat.v1`,
and those that need Keras 2 get it from tf-keras. test_tensorflow_seeds.py lists all that is replaced.
"""

from __future__ import annotations

import ast
import os
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np
import tensorflow

KIND = pathlib.Path(sys.argv[1]).stem
TEXT = pathlib.Path(sys.argv[1]).read_text()
IS_GRAPH = KIND in ("graph", "adasum", "elastic_graph")
# They show some statements, or what only a job of MPI's launcher can do.
IS_PART = KIND.startswith(("pin", "little", "mpi"))
v1 = tensorflow.compat.v1
if IS_GRAPH:
    v1.disable_eager_execution()

import horovod.tensorflow as hvd  # noqa: E402

# Its operations use the real module; the program imports the names of TensorFlow 1.
if IS_GRAPH or KIND in ("elastic_fit", "keras_mnist"):
    sys.modules["tensorflow"] = v1
RUNS = 6


class Limited:
    """`MonitoredTrainingSession` that stops after some runs, with checkpoints in a temporary folder."""

    made = v1.train.MonitoredTrainingSession
    last: Any = None

    def __init__(self, checkpoint_dir: str | None = None, **options: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        options["checkpoint_dir"] = checkpoint_dir and self.folder.name
        self.session, self.runs = Limited.made(**options), 0

    def __enter__(self) -> Limited:
        self.session.__enter__()
        return self

    def __exit__(self, *what: Any) -> Any:
        return self.session.__exit__(*what)

    def should_stop(self) -> bool:
        if self.runs == RUNS:
            Limited.last = self.session.run(WEIGHT)
        return self.runs >= RUNS

    def run(self, *what: Any) -> Any:
        self.runs += 1
        return self.session.run(*what)


WEIGHT: Any = None


def of_keras() -> None:
    """Gives Keras 3 the session pin of Keras 2, which has no meaning there, and small data instead of MNIST's."""
    import keras

    keras.backend.set_session = lambda session: None
    generator = np.random.default_rng(os.getpid())
    images, labels = generator.integers(256, size=(64, 28, 28)).astype("uint8"), generator.integers(10, size=64)
    keras.datasets.mnist.load_data = lambda: ((images, labels), (images[:8], labels[:8]))


def given() -> dict[str, Any]:
    """Returns the names that a program assumes. Models and data differ between ranks."""
    if KIND == "keras_mnist":
        of_keras()
        return {}
    if KIND in ("xla", "pin"):
        return {"os": os, "tf": tensorflow, "hvd": hvd}
    if IS_PART:
        return {"tf": v1, "hvd": hvd, "K": v1.keras.backend}
    names: dict[str, Any] = {"lr": 0.01, "base_lr": 0.01, "epochs": 3, "batches_per_epoch": 4, "batches_per_commit": 2}
    if IS_GRAPH:
        global WEIGHT  # noqa: PLW0603
        v1.train.get_or_create_global_step()
        WEIGHT = v1.get_variable("weight", initializer=np.random.default_rng(os.getpid()).normal(size=3))
        v1.train.MonitoredTrainingSession = Limited
        return {**names, "tf": v1, "hvd": hvd, "loss": v1.reduce_sum((WEIGHT - os.getpid() % 7) ** 2)}
    keras = tensorflow.keras
    keras.utils.set_random_seed(os.getpid())
    layers = [keras.layers.Input((4,)), keras.layers.Dense(3, activation="softmax")]
    model = keras.Sequential(layers)
    inputs, targets = np.random.normal(size=(32, 4)).astype("float32"), np.random.randint(3, size=32)
    dataset = tensorflow.data.Dataset.from_tensor_slices((inputs, targets)).batch(4)
    dataset = dataset.repeat() if "fit" in KIND else dataset.repeat(10)
    names.update(model=model, mnist_model=model, dataset=dataset, keras=keras, tf=tensorflow)
    one_hot = np.eye(3, dtype="float32")[targets]
    return {**names, "get_random_batch": lambda: (inputs[:4], one_hot[:4])}


class Test(tensorflow.test.TestCase):
    """The class of which a program shows a method."""

    def random_uniform(self, *arguments: Any, **options: Any) -> Any:
        return tensorflow.random.uniform(*arguments, **options)


class Filled(ast.NodeTransformer):
    """Leaves the names that are given where the program has `...`."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        is_open = isinstance(node.value, ast.Constant) and node.value.value is ...
        return ast.Pass() if is_open else node


def check(names: dict[str, Any]) -> None:
    """All ranks have the same weights, and trained to the end."""
    if IS_PART:
        assert hvd.size() == 2
        return
    if KIND == "adasum":
        train = names["opt"].minimize(names["loss"])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(0))
            before = session.run(WEIGHT)
            for _ in range(5):
                session.run(train)
            found = session.run(WEIGHT)
        assert np.isfinite(found).all()
        assert (found != before).all()
    elif KIND == "graph":
        found = Limited.last
    elif KIND == "xla":
        # Each rank draws other numbers.
        tensorflow.random.set_seed(hvd.rank())
        found = names["compiled_hvd_allreduce"](Test(), tensorflow.float32, 2).numpy().reshape(-1)
        assert found.size == 17 * 17
        assert np.abs(found).max() > 100
    elif KIND == "elastic_graph":
        # What was committed last: the session is closed.
        found = np.concatenate([np.ravel(value) for _, value in names["state"]._copies])
        assert len(found) > len(WEIGHT.shape)
    else:
        found = np.concatenate([weight.flatten() for weight in names["model"].get_weights()])
    everybodys = hvd.allgather_object(np.asarray(found).tolist())
    assert all(each == everybodys[0] for each in everybodys), everybodys
    if "state" in names:
        assert names["state"].epoch in (names["epochs"] - 1, names["epochs"]), names["state"].epoch
        assert names["state"].commits > 0


def main() -> None:
    names = given()
    if "hvd.init(" not in TEXT:
        hvd.init()
    outcome = "ran"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tree = ast.fix_missing_locations(Filled().visit(ast.parse(TEXT)))
        try:
            exec(compile(tree, KIND, "exec"), names)
        except (ValueError, ModuleNotFoundError) as error:
            if not KIND.startswith("mpi"):
                raise
            outcome = f"{type(error).__name__}: {error}"
        else:
            check(names)
        os.chdir("/")
    hvd.shutdown()
    print(f"program {KIND}: {outcome}", flush=True)


main()
