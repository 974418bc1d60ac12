"""A kernel executes the cells of the notebook in order, as Jupyter does."""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

import pytest

NOTEBOOK = pathlib.Path(__file__).parent.parent / "examples" / "notebook_digits.ipynb"
TIMEOUT_S = 240
# What a kernel reads from the user's home by default.
FOLDERS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")
# A kernel chooses the backend of matplotlib itself, and passes on less output where it finds pytest.
REMOVED = ("MPLBACKEND", "PYTEST_CURRENT_TEST")


def executed(notebook: pathlib.Path, folder: pathlib.Path) -> list[Any]:
    """The cells of code after a kernel has executed them. Raises CellExecutionError with the traceback of a cell.

    The kernel is a process of this Python, with settings in `folder`. It opens no port: its sockets are files in a
    folder with a short name, as the path of one may have 107 characters.
    """
    needed = "a kernel needs it: tests/setup/environment.py notebook"
    nbclient = pytest.importorskip("nbclient", reason=needed)
    pytest.importorskip("ipykernel", reason=needed)
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "tests", "language": "python"}))
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED}
    environment.update({name: str(folder / name.lower()) for name in FOLDERS})
    cells = nbformat.read(notebook, as_version=nbformat.NO_CONVERT)
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp") as sockets:
        kernel = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(folder / "kernels")], ensure_native_kernel=False),
            connection_file=str(folder / "kernel.json"),
            transport="ipc",
            ip=f"{sockets}/kernel",
        )
        client = nbclient.NotebookClient(cells, km=kernel, timeout=TIMEOUT_S)
        client.execute(env=environment, cwd=str(folder), cleanup_kc=True)
    return [cell for cell in cells.cells if cell.cell_type == "code"]


def printed(cells: list[Any]) -> str:
    """What cells have printed."""
    outputs = [output for cell in cells for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: pathlib.Path) -> None:
    for module in ("torch", "sklearn", "cloudpickle", "matplotlib"):
        pytest.importorskip(module)
    cells = executed(NOTEBOOK, tmp_path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = printed(cells)
    for rank in range(4):
        assert f"rank {rank} of 4: the sum of all ranks is 6" in text
    accuracy = re.search(r"accuracy on images that no rank has seen: (\S+)", text)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8
    assert "all ranks have the same weights: True" in text
    assert any("image/png" in output.get("data", {}) for output in cells[-1].outputs), "the last cell shows no figure"


def test_a_cell_that_fails_is_reported_with_its_traceback(tmp_path: pathlib.Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="a kernel needs it: tests/setup/environment.py notebook")
    stored = json.loads(NOTEBOOK.read_text())
    source = "import os, sys\nprint(sys.executable, os.getcwd())\nraise KeyError('gone')"
    cell = next(cell for cell in stored["cells"] if cell["cell_type"] == "code")
    folder = tmp_path / ("a-long-name-" * 10)
    folder.mkdir()
    notebook = folder / "failing.ipynb"
    notebook.write_text(json.dumps({**stored, "cells": [{**cell, "source": source}]}))
    with pytest.raises(nbclient.exceptions.CellExecutionError) as failed:
        executed(notebook, folder)
    assert (failed.value.ename, failed.value.evalue) == ("KeyError", "'gone'")
    assert f"{sys.executable} {folder}" in str(failed.value), "another Python, or another folder"


def test_the_notebook_is_stored_without_output() -> None:
    stored = json.loads(NOTEBOOK.read_text())
    assert stored["nbformat"] == 4
    for cell in stored["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
