"""Ranges of NVTX, with a library in NVIDIA's place that writes down what is called."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

from conftest import PACKAGE, ronde_binary

from ronde.frameworks import nvtx, world

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = """
#include <stdio.h>
#include <stdlib.h>
static void note(const char *what) {
    FILE *file = fopen(getenv("NOTES"), "a");
    fprintf(file, "%s\\n", what);
    fclose(file);
}
int nvtxRangePushA(const char *text) { note(text); return 0; }
int nvtxRangePop(void) { note("pop"); return 0; }
"""
SCRIPT = "import torch, ronde.torch as hvd; hvd.init(); hvd.allreduce(torch.ones(3), name='ranged'); hvd.shutdown()"
TIMEOUT_S = 120


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No ranges, and nothing opened."""
    for name in ("RONDE_NVTX", "RONDE_NVTX_LIBRARY", "HOROVOD_DISABLE_NVTX_RANGES", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    nvtx.load.cache_clear()
    yield
    nvtx.load.cache_clear()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("nvtx")
    (folder / "nvtx.c").write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libnvtx.so", "nvtx.c"], cwd=folder, check=True, timeout=TIMEOUT_S)
    return folder / "libnvtx.so"


def test_without_a_profiler_there_are_no_ranges() -> None:
    assert nvtx.load() is None
    assert world.traced("allreduce", "x") is world.traced("allgather", None)


@pytest.mark.parametrize("variable", ["RONDE_NVTX", "NVTX_INJECTION64_PATH"])
def test_a_range_ends_also_after_an_error(
    library: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    notes = tmp_path / "notes"
    for name, value in ((variable, "1"), ("RONDE_NVTX_LIBRARY", str(library)), ("NOTES", str(notes))):
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyError), world.traced("allreduce", "x"):
        raise KeyError
    with world.traced("barrier", None):
        assert notes.read_text().splitlines() == ["ronde::allreduce.x", "pop", "ronde::barrier"]
    nvtx.load.cache_clear()
    monkeypatch.setenv("HOROVOD_DISABLE_NVTX_RANGES", "1")
    assert nvtx.load() is None


def test_a_library_that_is_not_there_is_reported_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_NVTX_LIBRARY", "/no/such/library.so")
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/a/profiler.so")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nvtx.load() is None
    nvtx.load.cache_clear()
    monkeypatch.setenv("RONDE_NVTX", "1")
    with pytest.warns(RuntimeWarning, match=r"no ranges of NVTX: /no/such/library.so.*pip install nvidia-nvtx-cu12"):
        assert nvtx.load() is None


def test_a_job_has_a_range_for_each_submission_and_wait(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    notes = tmp_path / "notes"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "RONDE_NVTX": "1", "NOTES": str(notes)}
    environment["RONDE_NVTX_LIBRARY"] = str(library)
    command = [ronde_binary(), "run", "-np", "1", sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = notes.read_text().splitlines()
    assert "ronde::allreduce.ranged" in lines, lines
    assert "ronde::synchronize.allreduce" in lines, lines
    assert lines.count("pop") == len(lines) // 2
