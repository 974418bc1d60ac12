"""Tensors on GPUs, in worlds of real workers on the software device of `tests/device`.

The device shows order, failures and lifetimes. It is no GPU: no figure is taken from it, and PyTorch has no tensors on
it, so workers use arrays with `__cuda_array_interface__`. What PyTorch's part adds runs where there is a GPU
(`workers/torch_cuda.py`, `make gpu-test`).
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Callable

import numpy
import pytest
from conftest import ronde_binary

from ronde import device

World = Callable[..., str]

ASKED = """
import ronde
from ronde import _ronde
try:
    {}
except ronde.RondeError as error:
    print(error.cause, error)
"""


@pytest.fixture
def software_device(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Makes processes find the software device under the names of NVIDIA's libraries."""
    library = pathlib.Path(ronde_binary()).with_name("libronde_software_device.so")
    assert library.is_file(), f"{library} is missing; build the workspace first (`make build-tests`)"
    for name in ("libcuda.so.1", "libnccl.so.2"):
        (tmp_path / name).symlink_to(library)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 1), (3, 2)])
def test_results_have_the_bits_of_those_in_main_memory(
    world: World, software_device: pathlib.Path, ranks: int, sidecars: int
) -> None:
    assert world("gpu_collectives.py", ranks, sidecars).count("devices hold") == ranks


@pytest.mark.parametrize("mapped", ["0", "1"])
@pytest.mark.parametrize("ring", ["0", "1"])
def test_results_by_every_path(
    world: World, software_device: pathlib.Path, monkeypatch: pytest.MonkeyPatch, ring: str, mapped: str
) -> None:
    monkeypatch.setenv("RONDE_RING", ring)
    monkeypatch.setenv("RONDE_MAPPED", mapped)
    monkeypatch.setenv("RONDE_DEVICE_COPY_DELAY_US", "300")
    assert world("gpu_order.py", 2, 2).count("order holds") == 2


def test_refusals(world: World, software_device: pathlib.Path) -> None:
    assert world("gpu_refusals.py", 1, 1).count("refusals hold") == 1


def test_a_machine_without_a_driver_says_so() -> None:
    program = ASKED.format("_ronde.gpu_of(4096)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    if "libcuda.so.1" not in done.stdout:
        pytest.skip("LEFT OUT: this machine has NVIDIA's driver")
    assert done.stdout.startswith("device libcuda.so.1 cannot be opened"), done.stdout
    assert "Install NVIDIA's driver" in done.stdout


def test_a_driver_without_a_device_says_so(software_device: pathlib.Path) -> None:
    program = ASKED.format("_ronde.gpus()")
    environment = {**os.environ, "RONDE_DEVICE_COUNT": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert done.stdout.startswith("device libcuda.so.1 is there, but no GPU can be used"), done.stdout


def test_strides_of_dense_arrays() -> None:
    for shape in [(), (3,), (2, 3), (4, 1, 5)]:
        assert device._dense_strides(shape, 8) == numpy.empty(shape).strides


def test_an_interface_without_streams_is_refused() -> None:
    class Array:
        __cuda_array_interface__ = {"version": 2, "shape": (2,), "typestr": "<f4", "data": (4096, False)}

    with pytest.raises(ValueError, match="version 2"):
        device.array_of(Array())
