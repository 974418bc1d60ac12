"""The parts of `make gpu-test`, as far as they work without a GPU."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import pytest
from conftest import PACKAGE, ronde_binary

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "tests" / "gpu"


def part(name: str) -> ModuleType:
    """Loads a file of the command."""
    specification = importlib.util.spec_from_file_location(f"gpu_test_{name.strip('_')}", FOLDER / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def command() -> ModuleType:
    return part("__main__")


class Hosts:
    """Imitates network namespaces."""

    remote_shell = "sh there"

    def address(self, host: int) -> str:
        return f"10.0.0.{host + 1}"


def test_the_table_has_a_row_for_each_figure(command: ModuleType) -> None:
    output = 'rank 0\n0: FIGURE ["all-reduce of 1 MB, ronde", "2.00 ms, 0.52 GB/s"]\nrank 1\n'
    assert command.figures(output) == [("all-reduce of 1 MB, ronde", "2.00 ms, 0.52 GB/s")]
    rows = [command.Row("speed", "passed", True), command.Row("training", "FAILED with status 1", False)]
    assert command.table(rows) == ("| on a GPU | |\n|---|---|\n| speed | passed |\n| training | FAILED with status 1 |")


@pytest.mark.parametrize(
    ("gpus", "levels"), [(1, []), (2, [(2, 1)]), (3, [(3, 1)]), (4, [(4, 1), (4, 2)]), (7, [(7, 1), (4, 2)])]
)
def test_steps_fit_the_gpus(command: ModuleType, gpus: int, levels: list[tuple[int, int]]) -> None:
    assert command.two_levels(gpus) == levels
    steps = command.steps("/folder", gpus)
    titles = [step.title for step in steps]
    assert len(set(titles)) == len(titles), "each row has a title of its own"
    assert all(pathlib.Path(step.command[0]).is_file() for step in steps)
    stores = [step.command[-1] for step in steps if step.command[-1].startswith("/folder")]
    assert len(set(stores)) == len(stores), "no job finds the store of an earlier one"
    for way in ({"levels": "2"}, {"options": ("--gpu",)}):
        ((name, value),) = way.items()
        found = [step for step in steps if getattr(step, name) == value]
        assert [(step.ranks, step.sidecars) for step in found[::2]] == levels
        assert all(step.staging == "ronde" for step in found)
    plugin = [step for step in steps if "--nccl-net" in step.options]
    assert len(plugin) == 1
    assert dict(plugin[0].variables)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_hosts_are_namespaces_where_there_are_some(command: ModuleType) -> None:
    step = command.Step("title", ["x.py"], 2, ranks=4, is_apart=True)
    assert step.placement(None) == ["-np", "4", "--sidecars", "2"]
    there = step.placement(Hosts())
    assert there == ["-np", "4", "-H", "10.0.0.1:2,10.0.0.2:2", "--remote-shell", "sh there"]
    assert step._replace(is_apart=False).placement(Hosts()) == ["-np", "4", "--sidecars", "2"]


def test_rows_name_what_was_not_run(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    until = time.monotonic() + 60
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    (row,) = command.lanes("ronde", until, Hosts(), "/folder")
    assert row.result == "not run: this machine has 8 cores, and 16 are needed"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    (row,) = command.lanes("ronde", until, None, "/folder")
    assert row.result == "not run: network namespaces are needed"
    step = command.Step("late", ["x.py"], 1)
    assert command.run("ronde", step, time.monotonic() - 1, None) == [
        command.Row("late", "not run: the 480 s of the command are over", False)
    ]


def test_a_step_that_fails_is_a_row(command: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    step = command.Step("failing", ["-c", "raise SystemExit('for a test')"], 1, ranks=1)
    (row,) = command.run(ronde_binary(), step, time.monotonic() + 120, None)
    assert not row.is_ok
    assert row.result.startswith("FAILED with status ")
    assert "for a test" in capfd.readouterr().err


def test_without_a_gpu_the_reason_is_printed() -> None:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(PACKAGE), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("LD_LIBRARY_PATH", None)
    done = subprocess.run(
        [sys.executable, "-m", "gpu"],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr.startswith("NOT RUN: "), done.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "printed"),
    [
        ("kinds", ["cpu"], "all types hold"),
        ("overlap", ["cpu"], "FIGURE"),
        ("training", ["cpu"], "the same as one process"),
    ],
)
def test_scripts_run_in_main_memory(
    command: ModuleType, capfd: pytest.CaptureFixture[str], script: str, arguments: list[str], printed: str
) -> None:
    pytest.importorskip("torch")
    job = [
        ronde_binary(),
        "run",
        "-np",
        "2",
        "--sidecars",
        "2",
        sys.executable,
        str(FOLDER / f"{script}.py"),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(job, capture_output=True, text=True, timeout=180, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed in done.stdout


def test_the_share_of_copies_that_kernels_hide() -> None:
    pytest.importorskip("torch")
    overlap = part("overlap")
    assert overlap.merged([(3, 5), (0, 2), (4, 7), (1, 2)]) == [(0, 2), (3, 7)]
    assert overlap.share_within([(0, 4)], [(1, 2), (3, 9)]) == 0.5
    assert overlap.share_within([(0, 1), (2, 3)], [(0, 3), (0, 1)]) == 1.0
    assert overlap.share_within([(0, 1)], []) == 0.0
    assert overlap.share_within([], [(0, 1)]) == 0.0


def test_gloo_and_nccl_use_the_link_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "as before")
    speed = part("speed")
    speed.choose_interface(["lo", "eth0", "virbr0"])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "as before"
    speed.choose_interface(["lo", "v1"])
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("v1", "v1")
