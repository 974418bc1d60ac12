"""`torch.distributed` on ronde, in worlds of real workers. The scripts in `workers/` assert."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from typing import Callable

import pytest
from conftest import PACKAGE, WORKERS, WORLD_TIMEOUT_S, ronde_binary

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("ranks", "sidecars", "way"), [(1, 1, ""), (2, 1, "rendezvous"), (3, 2, ""), (4, 2, "rendezvous")]
)
def test_collectives_of_torch_distributed(world: Callable[..., str], ranks: int, sidecars: int, way: str) -> None:
    assert world("c10d.py", ranks, sidecars, *way.split()).count("all collectives are right") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 1)])
def test_ddp_trains_as_one_process_does(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("ddp.py", ranks, sidecars).count("the same as one process") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_results_are_written_in_order_and_in_time(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_works.py", ranks, sidecars, "ronde").count("results come in order") == ranks


def test_the_order_of_results_matches_gloo(world: Callable[..., str], tmp_path: pathlib.Path) -> None:
    assert world("c10d_works.py", 2, 1, "gloo", str(tmp_path / "store")).count("results come in order") == 2


def test_sizes_that_differ_between_ranks_are_errors(world: Callable[..., str]) -> None:
    assert world("c10d_sizes.py", 2, 2).count("sizes are compared") == 2


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 2)])
def test_types_shapes_and_hooks(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_types.py", ranks, sidecars).count("all types are right") == ranks


@pytest.mark.parametrize(("sidecars", "way"), [(1, ""), (2, "ronde")])
def test_groups_are_made_by_their_members(world: Callable[..., str], sidecars: int, way: str) -> None:
    assert world("c10d_groups.py", 4, sidecars, *way.split()).count("all groups are right") == 4


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_what_pytorch_builds_on_groups(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_features.py", ranks, sidecars).count("all features work") == ranks


def test_workers_open_no_socket_of_the_network(world: Callable[..., str]) -> None:
    assert world("c10d_sockets.py", 2, 2).count("no socket of the network") == 2


def test_gloo_keeps_the_store_of_pytorch_in_the_same_process(world: Callable[..., str]) -> None:
    assert world("c10d_sockets.py", 2, 1, "gloo").count("no socket of the network") == 2


@pytest.mark.parametrize(
    ("scheme", "size", "backend"),
    [("file", 2, "ronde"), ("tcp", 3, "ronde"), ("env", 2, "cpu:ronde"), ("file", 1, "ronde")],
)
def test_ranks_meet_by_the_means_of_pytorch(tmp_path: pathlib.Path, scheme: str, size: int, backend: str) -> None:
    """Processes that no launcher of ronde started share one sidecar."""
    ronde_binary()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    method = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{port}", "env": "env://"}[scheme]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_RANK", "RONDE_JOB"))}
    environment = {**kept, "PYTHONPATH": str(PACKAGE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    commands = [
        [sys.executable, str(WORKERS / "c10d_stores.py"), str(rank), str(size), method, backend] for rank in range(size)
    ]
    ranks = [
        subprocess.Popen(each, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for each in commands
    ]
    try:
        outputs = [each.communicate(timeout=WORLD_TIMEOUT_S)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0] * size, outputs
    assert all("the ranks have met" in output for output in outputs), outputs
