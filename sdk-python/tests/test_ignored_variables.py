"""Horovod's variables without effect: each that is set is named, and is on a page."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from conftest import PACKAGE, ronde_binary

from horovod.runner import translation
from ronde.frameworks import ignored_variables

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
TIMEOUT_S = 180


def test_each_is_on_the_page_and_has_a_page_to_read() -> None:
    described = set(re.findall(r"`(HOROVOD_\w+)`", (DOCS / "MIGRATING.md").read_text()))
    assert set(ignored_variables.IGNORED) <= described
    for name, ignored in ignored_variables.IGNORED.items():
        pages = re.findall(r"\(docs/(\w+\.md)\)$", ignored.reason)
        assert [(DOCS / page).is_file() for page in pages] == [True], name


def test_values_that_request_what_happens_in_any_case_are_not_named() -> None:
    """`horovodrun` sets the first two in every job."""
    variables = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "GLOO", "HOROVOD_TORUS_ALLREDUCE": "0"}
    assert ignored_variables.notes_of({**variables, "HOROVOD_CYCLE_TIME": "", "HOROVOD_FUSION_THRESHOLD": "0"}) == []
    notes = ignored_variables.notes_of({"HOROVOD_CONTROLLER": "mpi", "HOROVOD_BATCH_D2D_MEMCOPIES": "0"})
    assert [note.partition(" ")[0] for note in notes] == ["HOROVOD_BATCH_D2D_MEMCOPIES=0", "HOROVOD_CONTROLLER=mpi"]


def test_a_flag_without_effect_is_reported_by_the_launcher_alone() -> None:
    given = {"cycle_time_ms": 3.5, "hierarchical_allgather": True, "torus_allreduce": True, "num_nccl_streams": 2}
    given |= {"gloo_timeout_seconds": 9, "mpi_threads_disable": True, "disable_cache": True}
    given |= {"mpi_args": "--display-map", "binding_args": "-x"}
    assert set(given) == set(translation.IGNORED)
    found = translation.translate({"num_proc": 2, **given})
    assert len(found.notes) == len(given)
    assert ignored_variables.notes_of(found.exports) == []
    # It changes what `mpi_threads_supported` returns.
    assert found.exports["HOROVOD_MPI_THREADS_DISABLE"] == "1"


def test_init_names_each_once_on_one_rank() -> None:
    variables = dict.fromkeys(ignored_variables.IGNORED, "1")
    program = "import ronde.torch as hvd; hvd.init(); hvd.shutdown(); hvd.init(); print('it ran')"
    command = [ronde_binary(), "run", "-np", "2", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environment)
    assert done.stdout.count("it ran") == 2
    for name in variables:
        assert done.stderr.count(f"{name}=1 has no effect: ") == 1, (name, done.stderr)


@pytest.mark.parametrize(("module", "count"), [("ronde.frameworks.basics", 1), ("ronde.torch", 0)])
def test_hierarchical_adasum_is_named_where_no_module_has_it(module: str, count: int) -> None:
    program = f"import {module} as hvd; hvd.init(); hvd.shutdown(); hvd.init(); print('it ran')"
    command = [ronde_binary(), "run", "-np", "2", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "RONDE_HIERARCHICAL_ADASUM": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=environment)
    assert done.stdout.count("it ran") == 2
    assert done.stderr.count("RONDE_HIERARCHICAL_ADASUM=1 has no effect: ") == count, done.stderr
