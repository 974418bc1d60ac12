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

import nvtx_library
from conftest import PACKAGE, ronde_binary

from ronde.frameworks import nvtx, world

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = "import torch, ronde.torch as hvd; hvd.init(); hvd.allreduce(torch.ones(3), name='ranged'); hvd.shutdown()"
STEP = """
import torch, ronde.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
model(torch.ones(2, 3)).sum().backward()
hvd.synchronize(optimizer._handles[model.weight][0])
optimizer.step()
hvd.shutdown()
"""
GROUP = """
import torch, ronde.torch as hvd
hvd.init()
model = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1))
inner = torch.optim.SGD(model.parameters(), lr=0.1)
groups = [list(model[1].parameters())]
optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), groups=groups)
model(torch.tensor([1, 2])).sum().backward()
optimizer.step()
hvd.shutdown()
"""
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
    return nvtx_library.built(tmp_path_factory.mktemp("nvtx"))


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
    lines = ranges_of(SCRIPT, 1, library, tmp_path)
    assert "ronde::allreduce.ranged" in lines, lines
    assert "ronde::synchronize.allreduce" in lines, lines


def test_a_step_has_a_range_for_each_submission_and_wait(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Of both gradients and of the vote; one of them is waited for by its handle, and again in the step."""
    lines = ranges_of(STEP, 2, library, tmp_path)
    for name in ("weight", "bias", "gradients_present.weight"):
        assert lines.count(f"ronde::allreduce.{name}") == 2, lines
    assert lines.count("ronde::synchronize.allreduce") == 2 * 3, lines


def test_the_wait_of_a_group_is_one_range_with_its_kind(library: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Of weight and bias. The sparse gradient beside them is gathered in two ranges; the vote alone is an allreduce."""
    lines = ranges_of(GROUP, 2, library, tmp_path)
    assert lines.count("ronde::synchronize.grouped_allreduce") == 2, lines
    assert lines.count("ronde::synchronize.allgather") == 2 * 2, lines
    assert lines.count("ronde::synchronize.allreduce") == 2, lines


def ranges_of(script: str, ranks: int, library: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Runs a script as every rank of a job; returns the names of ranges, and a `pop` for the end of each."""
    notes = folder / "notes"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "RONDE_NVTX": "1", "NOTES": str(notes)}
    environment["RONDE_NVTX_LIBRARY"] = str(library)
    command = [ronde_binary(), "run", "-np", str(ranks), sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = notes.read_text().splitlines()
    assert lines.count("pop") == len(lines) // 2
    return lines
