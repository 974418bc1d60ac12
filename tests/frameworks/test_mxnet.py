"""ronde.mxnet and horovod.mxnet with real processes. The ranks compare with NumPy, or with one process."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import pathlib
import pickle
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from coverage_names import check_imports

pytest.importorskip("mxnet")

import nvtx_library

if TYPE_CHECKING:
    from conftest import Job

ROOT = pathlib.Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "sdk-python" / "examples"
OWN = pathlib.Path(__file__).parent / "seeds" / "mxnet.py"


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
@pytest.mark.parametrize(
    ("program", "words"), [("mxnet_collectives.py", "checks passed"), ("mxnet_training.py", "training passed")]
)
def test_ranks_agree_with_one_process(job: Job, program: str, words: str, ranks: int, sidecars: int) -> None:
    printed = job(program, ranks, sidecars=sidecars)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: {words}" in printed, printed


def test_training_has_ranges_of_nvtx(job: Job, tmp_path: pathlib.Path) -> None:
    """For each submission and each wait of trainers, optimizers and broadcasts of parameters."""
    notes = tmp_path / "notes"
    variables = {"RONDE_NVTX": "1", "RONDE_NVTX_LIBRARY": str(nvtx_library.built(tmp_path)), "NOTES": str(notes)}
    job("mxnet_training.py", 2, **variables)
    lines = notes.read_text().splitlines()
    for kind, name in (
        ("allreduce", "DistributedTrainer..0"),
        ("grouped_allreduce", "DistributedTrainer..0"),
        ("allreduce", "DistributedOptimizer.0"),
        ("broadcast", "parameter.array0"),
    ):
        assert f"ronde::{kind}.{name}" in lines, (kind, name)
        assert f"ronde::synchronize.{kind}" in lines, kind
    submitted = [line for line in lines if line.startswith("ronde::grouped_allreduce.")]
    assert lines.count("ronde::synchronize.grouped_allreduce") == len(submitted)
    assert lines.count("pop") == len(lines) // 2


def test_a_program_like_the_documentations_runs(job: Job) -> None:
    printed = job("mxnet_seeds.py", 2, str(OWN))
    assert printed.count("program mxnet: ran") == 2, printed


def test_the_documentation_runs(job: Job, tmp_path: pathlib.Path) -> None:
    named = os.environ.get("RONDE_SEEDS")
    if not named:
        pytest.skip("RONDE_SEEDS names no folder with the documentation")
    text = "\n".join(path.read_text(errors="replace") for path in sorted(pathlib.Path(named).glob("*.txt")))
    marked = re.findall(r"^( *)\.\. code-block:: python\n((?:\1 +.*\n|\s*\n)+)", text, re.MULTILINE)
    found = [block for _, block in marked if "import horovod.mxnet as hvd" in block]
    assert found, "the documentation has no block for MXNet"
    for number, block in enumerate(found):
        path = tmp_path / f"documented{number}.py"
        path.write_text(textwrap.dedent(block))
        printed = job("mxnet_seeds.py", 2, str(path))
        assert printed.count(f"program documented{number}: ran") == 2, printed


def test_the_example_trains(job: Job) -> None:
    printed = job(EXAMPLES / "mxnet_digits.py", 2, "--epochs", "3")
    accuracy = re.search(r"accuracy after 3 epochs: (0\.\d+)", printed)
    assert accuracy, printed
    assert float(accuracy[1]) > 0.85, printed


def test_horovods_signatures() -> None:
    """Names and parameters, in Horovod's order."""
    hvd = importlib.import_module("horovod.mxnet")
    expected = {
        "allreduce": "tensor average name priority prescale_factor postscale_factor process_set op",
        "allreduce_": "tensor average name priority prescale_factor postscale_factor process_set op",
        "grouped_allreduce": "tensors average name priority prescale_factor postscale_factor process_set op",
        "grouped_allreduce_": "tensors average name priority prescale_factor postscale_factor process_set op",
        "allgather": "tensor name priority process_set",
        "grouped_allgather": "tensors name priority process_set",
        "broadcast": "tensor root_rank name priority process_set",
        "broadcast_": "tensor root_rank name priority process_set",
        "alltoall": "tensor splits name priority process_set",
        "reducescatter": "tensor op name priority process_set prescale_factor postscale_factor",
        "grouped_reducescatter": "tensors op name priority process_set prescale_factor postscale_factor",
        "broadcast_parameters": "params root_rank prefix",
        "DistributedOptimizer": "optimizer gradient_predivide_factor num_groups process_set",
        "DistributedTrainer": "params optimizer optimizer_params compression gradient_predivide_factor prefix "
        "num_groups process_set",
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(hvd, name)).parameters) == parameters.split(), name
    from horovod.mxnet.mpi_ops import allreduce

    assert allreduce is hvd.allreduce
    assert set(hvd.__all__) >= {*importlib.import_module("ronde.mxnet").__all__, "AdaSum"}


def test_a_numpy_that_mxnet_cannot_use_is_named() -> None:
    """As NumPy 1.24 and later does, without the name that MXNet takes from it."""
    printed = errors_of("""
        import numpy

        given = numpy.__getattr__
        numpy.__getattr__ = lambda name: given("no such name" if name == "bool" else name)
        import ronde.mxnet
    """)
    assert re.search(
        r"ImportError: MXNet is installed, but cannot be imported with NumPy 1\.\d+.*\"numpy<1.24\"", printed
    ), printed


def test_a_release_of_mxnet_that_is_not_supported_is_named() -> None:
    """As MXNet 2, without the class of parameters that it has removed."""
    printed = errors_of("""
        import mxnet.gluon.parameter

        mxnet.__version__ = "2.0.0"
        del mxnet.gluon.parameter.ParameterDict
        import ronde.mxnet
    """)
    assert re.search(
        r"ImportError: MXNet 2\.0\.0 is installed, but this module is for MXNet 1\.9\.1: .*mxnet==1\.9\.1", printed
    ), printed


def errors_of(program: str) -> str:
    """Runs a program, and returns what it prints to the standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "sdk-python" / "python")},
        timeout=120,
    )
    return done.stderr


def test_an_optimizer_can_be_copied_and_pickled() -> None:
    """Both ask for attributes of an object that has none yet."""
    import mxnet
    from ronde.frameworks.process_sets import global_process_set
    from ronde.mxnet.optimizer import DistributedOptimizer, Reduction

    given = DistributedOptimizer.__new__(DistributedOptimizer)
    with pytest.raises(AttributeError, match="'DistributedOptimizer' object has no attribute 'rescale_grad'"):
        given.rescale_grad  # noqa: B018
    # As `__init__` does, which needs a session.
    given._optimizer = mxnet.optimizer.SGD(learning_rate=0.25)
    given._reduction = Reduction("name", 1.0, 0, global_process_set)
    for made in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert type(made) is DistributedOptimizer
        assert made._optimizer is not given._optimizer
        assert made.learning_rate == 0.25
        assert made._reduction._process_set is global_process_set


def test_names_of_the_page_of_coverage_have_their_parameters() -> None:
    check_imports("horovod.mxnet")
