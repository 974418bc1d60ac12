"""Programs for TensorFlow and Keras as Horovod's documentation shows them, on two ranks.

`seeds/` contains our own programs with the same calls in the same order. RONDE_SEEDS may name a folder with the
documentation itself, as text: its blocks of these kinds run as well, unchanged.
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
}


def run(job: Job, path: pathlib.Path) -> None:
    output = job("tensorflow_seeds.py", 2, str(path), TF_USE_LEGACY_KERAS="1")
    assert output.count(f"program {path.stem}: ran") == 2, output


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_program_like_the_documentations_runs(job: Job, kind: str) -> None:
    run(job, OWN / f"{kind}.py")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_documentation_runs(job: Job, kind: str, tmp_path: pathlib.Path) -> None:
    named = os.environ.get("RONDE_SEEDS")
    if not named:
        pytest.skip("RONDE_SEEDS names no folder with the documentation")
    words, others = KINDS[kind]
    text = "\n".join(path.read_text(errors="replace") for path in sorted(pathlib.Path(named).glob("*.txt")))
    marked = re.findall(r"^( *)\.\. code-block:: python\n((?:\1 +.*\n|\s*\n)+)", text, re.MULTILINE)
    # The options of a block in reStructuredText are before its program.
    options = re.compile(r"(?m)\A(:[\w-]+:.*\n)+")
    blocks = [options.sub("", textwrap.dedent(block).strip("\n")) + "\n" for _, block in marked]
    found = [b for b in blocks if all(word in b for word in words) and not any(word in b for word in others)]
    assert found, f"no block of the documentation is of the kind {kind}"
    (tmp_path / f"{kind}.py").write_text(found[0])
    run(job, tmp_path / f"{kind}.py")
