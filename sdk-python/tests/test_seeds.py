"""Programs as Horovod's documentation shows them, unchanged under `horovodrun -np 2` and `-np 4`.

`seeds/` contains our own programs with the same calls in the same order. RONDE_SEEDS may name a folder with the
documentation itself, as text: its blocks for PyTorch run as well, and each one is run or listed as an exception.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import textwrap
from functools import lru_cache

import pytest
from conftest import PACKAGE, WORKERS, ronde_binary

pytest.importorskip("torch")
pytest.importorskip("cloudpickle")

OWN = pathlib.Path(__file__).parent / "seeds"
COMPAT = PACKAGE.parent / "horovod-compat" / "src"
TIMEOUT_S = 400
WORLDS = [2, 4]
# Which words a block has that its kind consists of, and none of which others.
KINDS = {
    "pinning": (["if torch.cuda.is_available():", "torch.cuda.set_device(hvd.local_rank())"], ["import"]),
    "start_equal": (["hvd.broadcast_parameters(", "hvd.broadcast_optimizer_state("], ["import", "tf."]),
    "training": (["import horovod.torch as hvd", "DistributedSampler("], []),
    "clipping": (["optimizer.synchronize()", "optimizer.skip_synchronize()"], []),
    "adasum_optimizer": (["hvd.DistributedOptimizer(optimizer, named_parameters", "op=hvd.AdaSum"], []),
    "adasum": (["hvd.allreduce(tensor, op=hvd.AdaSum)"], []),
    "compressor": (["class CustomCompressor(Compressor):"], []),
    "compressor_registered": (["class Compression(object):", "custom = CustomCompressor"], []),
    "compression": (["compression=hvd.Compression.custom"], []),
    "elastic": (["import horovod.torch as hvd", "hvd.elastic.TorchState("], ["def training_fn"]),
    "objects": (["broadcast_object(optimizer.state_dict(), 0)"], []),
    "static_sets": (["hvd.init(process_sets=[even_set, odd_set])"], []),
    "dynamic_sets": (['hvd.init(process_sets="dynamic")'], []),
    "communicator_sets": (["hvd.init(comm, process_sets="], []),
}
# Blocks about horovod.torch that use unsupported functions.
ABOUT_OTHERS = ["ray", "spark", "def training_fn"]
# Their ranks are 0 to 3.
OF_FOUR = {"static_sets", "dynamic_sets"}


@lru_cache
def outcomes(folder: pathlib.Path, ranks: int) -> dict[str, list[str]]:
    """How each block of a folder ended on each rank."""
    environment = {
        **os.environ,
        "PATH": f"{pathlib.Path(ronde_binary()).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{PACKAGE}{os.pathsep}{COMPAT}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), "--start-timeout", "120"]
    command += [sys.executable, str(WORKERS / "seeds.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    found: dict[str, list[str]] = {}
    for name, outcome in re.findall(r"<stdout>:block (\w+): (.*)", done.stdout):
        found.setdefault(name, []).append(outcome)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    sets = [f"ProcessSet(process_set_id={number}, ranks={ranks}, mpi_comm=None)" for number, ranks in SETS]
    assert ranks != 4 or all(done.stdout.count(line) >= 4 for line in sets), done.stdout
    return found


SETS = [(0, [0, 1, 2, 3]), (1, [0, 2]), (2, [1, 3])]


def check(folder: pathlib.Path, name: str, ranks: int) -> None:
    found = outcomes(folder, ranks)[name]
    assert len(found) == ranks
    if name in OF_FOUR and ranks != 4:
        assert all(outcome.startswith("ValueError: ") for outcome in found), found
    elif name == "communicator_sets":
        # Communicators are of jobs that mpirun has started; and mpi4py may not be there.
        assert all(outcome.startswith(("ValueError: MPI.COMM_WORLD has 1", "ModuleNotFoundError")) for outcome in found)
    else:
        assert found == ["ran"] * ranks


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_program_like_the_documentations_runs(name: str, ranks: int) -> None:
    check(OWN, name, ranks)


def blocks(text: str) -> list[str]:
    """The blocks in Python of a text: those marked as such, and the examples of pages that were rendered."""
    marked = re.findall(r"^( *)\.\. code-block:: python\n((?:\1 +.*\n|\s*\n)+)", text, re.MULTILINE)
    found = [re.sub(r"(?m)\A(:[\w-]+:.*\n)+", "", textwrap.dedent(block).strip("\n")) + "\n" for _, block in marked]
    rendered = re.findall(r"^Example of gradient clipping:\n\n((?:.+\n)+?)Parameters\n", text, re.MULTILINE)
    rendered += re.findall(r"^(state_dict = broadcast_object(?:.+\n)+?)Parameters\n", text, re.MULTILINE)
    return [*found, *rendered]


def kind_of(block: str) -> str | None:
    fits = [
        name
        for name, (words, others) in KINDS.items()
        if all(word in block for word in words) and not any(word in block for word in others)
    ]
    assert len(fits) <= 1, (fits, block)
    return fits[0] if fits else None


@pytest.fixture(scope="module")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The blocks of the documentation as files, by their kind."""
    named = os.environ.get("RONDE_SEEDS")
    if not named:
        pytest.skip("RONDE_SEEDS names no folder with the documentation")
    folder = tmp_path_factory.mktemp("documentation")
    for path in sorted(pathlib.Path(named).glob("*.txt")):
        for block in blocks(path.read_text(errors="replace")):
            kind = kind_of(block)
            if kind:
                # The page of calls leaves the module out.
                (folder / f"{kind}.py").write_text(block.replace("= broadcast_object(", "= hvd.broadcast_object("))
            else:
                about_others = any(word in block for word in ABOUT_OTHERS)
                assert "horovod.torch" not in block or about_others, f"a block of {path.name} is of no kind:\n{block}"
    return folder


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_documentation_runs(documentation: pathlib.Path, name: str, ranks: int) -> None:
    check(documentation, name, ranks)
