"""The cells of the notebook run in order, as a program: a kernel does the same, in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

NOTEBOOK = pathlib.Path(__file__).parent.parent / "examples" / "notebook_digits.ipynb"
TIMEOUT_S = 240


def cells() -> list[str]:
    """The cells of code."""
    return [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: pathlib.Path) -> None:
    for module in ("torch", "sklearn", "cloudpickle", "matplotlib"):
        pytest.importorskip(module)
    program = tmp_path / "notebook.py"
    program.write_text("\n".join(cells()))
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, str(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4: the sum of all ranks is 6" in done.stdout
    accuracy = re.search(r"accuracy on images that no rank has seen: (\S+)", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8
    assert "all ranks have the same weights: True" in done.stdout


def test_the_notebook_is_stored_without_output() -> None:
    stored = json.loads(NOTEBOOK.read_text())
    assert stored["nbformat"] == 4
    for cell in stored["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
