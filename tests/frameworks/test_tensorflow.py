"""ronde.tensorflow, ronde.tensorflow.keras and ronde.keras, as jobs of real processes.

Each program of `workers/` checks its own results, against NumPy or against a training of one process.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import SDK, ronde_binary

pytest.importorskip("tensorflow")

from elastic_job import ElasticJob, Hosts

if TYPE_CHECKING:
    from conftest import Job

EXAMPLES = SDK / "examples"
RANKS = pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 1), (3, 2)])


@RANKS
def test_collectives_are_those_of_numpy(job: Job, ranks: int, sidecars: int) -> None:
    output = job("tensorflow_collectives.py", ranks, sidecars=sidecars)
    assert output.count("all collectives are right") == ranks


@RANKS
def test_gradients(job: Job, ranks: int, sidecars: int) -> None:
    assert job("tensorflow_gradients.py", ranks, sidecars=sidecars).count("all gradients are right") == ranks


@RANKS
def test_tapes_train_as_one_process(job: Job, ranks: int, sidecars: int) -> None:
    assert job("tensorflow_training.py", ranks, sidecars=sidecars).count("trained as one process") == ranks


@RANKS
def test_graphs_of_tensorflow_1(job: Job, ranks: int, sidecars: int) -> None:
    assert job("tensorflow_v1.py", ranks, sidecars=sidecars).count("TensorFlow 1 trains") == ranks


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("module", ["ronde.keras", "horovod.keras", "horovod.tensorflow.keras"])
def test_keras_3(job: Job, module: str, ranks: int) -> None:
    assert job("keras_training.py", ranks, module).count("trains as one process") == ranks


def test_keras_2(job: Job) -> None:
    output = job("keras_training.py", 2, "ronde.tensorflow.keras", TF_USE_LEGACY_KERAS="1")
    assert output.count("Keras 2 trains as one process") == 2


def test_keras_2_in_a_session_of_tensorflow_1(job: Job) -> None:
    output = job("keras_graph.py", 2, TF_USE_LEGACY_KERAS="1")
    assert output.count("Keras trains in a session") == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_edges(job: Job, ranks: int) -> None:
    assert job("tensorflow_edges.py", ranks).count("the edges are right") == ranks


def test_some_ranks_of_a_job(job: Job) -> None:
    assert job("tensorflow_some_ranks.py", 3).count("some ranks are a world") == 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_functions_that_xla_compiles(job: Job, ranks: int) -> None:
    assert job("tensorflow_xla.py", ranks).count("compiled functions are right") == ranks


def test_compiled_functions_are_refused_where_xla_cannot_call_ronde(job: Job) -> None:
    assert job("tensorflow_xla.py", 2, "refused").count("compiled functions are right") == 2


def test_auto_clustering_leaves_collectives_as_they_are(job: Job) -> None:
    output = job("tensorflow_training.py", 2, TF_XLA_FLAGS="--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit")
    assert output.count("trained as one process") == 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_bad_input(job: Job, ranks: int) -> None:
    assert job("tensorflow_errors.py", ranks).count("all errors are right") == ranks


def test_a_rank_that_dies_in_fit(job: Job) -> None:
    """The other rank's `fit` raises an error that names it."""
    output = job("keras_dies.py", 2, fails=True)
    assert re.search(r"fit raised (AbortedError|PeerLostError): .*rank 1", output), output


@pytest.mark.parametrize("example", ["tensorflow_digits.py", "keras_digits.py"])
def test_examples(job: Job, example: str) -> None:
    output = job(EXAMPLES / example, 2)
    found = re.findall(r"rank \d of 2: test accuracy ([\d.]+), weights (\w+)", output)
    assert len(found) == 2, output
    assert len({digest for _, digest in found}) == 1
    assert min(float(accuracy) for accuracy, _ in found) > 0.9


def test_synthetic_benchmark(job: Job) -> None:
    arguments = ["--model", "MobileNetV2", "--batch-size", "2", "--num-iters", "1", "--num-batches-per-iter", "1"]
    output = job(
        EXAMPLES / "tensorflow2_synthetic_benchmark.py", 2, "--fp16-allreduce", "--num-warmup-batches", "1", *arguments
    )
    assert re.search(r"Total img/sec on 2 CPU\(s\): [\d.]+", output), output


def test_the_benchmark_of_a_step_of_fit() -> None:
    """Its own check compares the weights with those of MultiWorkerMirroredStrategy."""
    command = [sys.executable, "-m", "ronde.bench", "keras", "--ranks", "2", "--rounds", "1", "--steps", "1"]
    variables = {**os.environ, "PYTHONPATH": str(SDK / "python"), "RONDE_BIN": ronde_binary()}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for row in ("ronde, DistributedOptimizer", "a barrier, no gradients", "MultiWorkerMirroredStrategy, ring"):
        assert re.search(rf"(?m)^{row} .*\d", done.stdout), done.stdout


def test_an_elastic_training_with_fit_survives_the_loss_of_a_worker() -> None:
    """Also of that with rank 0: the others have its state. A new worker takes its place."""
    command = [str(EXAMPLES / "keras_elastic_digits.py"), "--epochs", "8", "--pause", "0.1"]
    with ElasticJob(["-np", "2", "--min-np", "1"], command) as running:
        lost = running.await_size(2, 0)
        running.await_text("epoch 1 is complete")
        running.kill(lost.pid)
        running.await_text("continues as rank 0 of")
        reports = running.finish()
    assert reports[0].accuracy > 0.9


def test_an_elastic_training_with_fit_grows_from_one_worker(tmp_path: pathlib.Path) -> None:
    """Its graphs, which were traced by one rank, have collectives."""
    hosts = Hosts(tmp_path)
    hosts.set("127.0.0.1:1")
    options = ["-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts.script)]
    command = [str(EXAMPLES / "keras_elastic_digits.py"), "--epochs", "40", "--pause", "0.1", "--pause-below", "2"]
    with ElasticJob(options, command) as running:
        running.await_text("epoch 1 is complete")
        hosts.set("127.0.0.1:2")
        running.await_size(2)
        reports = running.finish()
    assert len(reports) == 2


def test_import_ronde_imports_no_framework() -> None:
    program = (
        "import sys, ronde, ronde.frameworks.basics\n"
        "print([name for name in ('tensorflow', 'keras') if name in sys.modules])"
    )
    path = {"PYTHONPATH": str(SDK / "python")}
    done = subprocess.run([sys.executable, "-c", program], env=path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_unsupported_versions_are_refused() -> None:
    """With the versions that work, in a process whose TensorFlow says that it is old."""
    program = (
        "import tensorflow as tf\ntf.__version__ = '2.12.0'\n"
        "try:\n    import ronde.tensorflow\nexcept ImportError as error:\n    print(error)"
    )
    path = {"PYTHONPATH": str(SDK / "python"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", program], env=path, capture_output=True, text=True, check=True)
    assert re.search(r"does not work with TensorFlow 2\.12\.0: .*2\.21", done.stdout), done


PROGRAMS = re.findall(
    r"```python\n(# (\w+)\.py: ronde run -np 2 .*?)```", (SDK.parent / "docs/TENSORFLOW.md").read_text(), re.S
)


@pytest.mark.parametrize("program", [text for text, _ in PROGRAMS], ids=[name for _, name in PROGRAMS])
def test_programs_of_the_documentation(job: Job, program: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "program.py").write_text(program)
    output = job(tmp_path / "program.py", 2)
    lines = re.findall(r"rank [01] of 2: (.*)", output)
    assert len(lines) == 2, output
    assert set(lines) <= {"the same weights True", "trained"}, output


def test_the_documentation_names_the_versions_of_the_refusal() -> None:
    from ronde.tensorflow.native import WORKS_WITH

    page = pathlib.Path(SDK.parent, "docs", "TENSORFLOW.md").read_text()
    assert ", ".join(WORKS_WITH) in page
