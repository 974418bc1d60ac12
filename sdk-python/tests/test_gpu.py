"""Tensors on GPUs, in worlds of real workers on the software device of `tests/device`.

The device shows order, failures and lifetimes. It is no GPU: no figure is taken from it, and PyTorch has no tensors on
it, so workers use arrays with `__cuda_array_interface__`. What PyTorch's part adds runs where there is a GPU
(`workers/torch_cuda.py`, `make gpu-test`).
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any, Callable

import numpy
import pytest
from conftest import PACKAGE, WORKERS, ronde_binary

from ronde import device, tensors
from ronde.frameworks import ignored_variables

World = Callable[..., str]

ASKED = """
import ronde
from ronde import _ronde
try:
    {}
except ronde.RondeError as error:
    print(error.cause, error)
"""


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


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2)])
def test_pytorch_by_stand_ins(world: World, software_device: pathlib.Path, ranks: int, sidecars: int) -> None:
    pytest.importorskip("torch")
    assert world("gpu_torch.py", ranks, sidecars).count("stand-ins hold") == ranks


def test_a_session_without_shared_memory(world: World, software_device: pathlib.Path) -> None:
    pytest.importorskip("torch")
    assert world("gpu_inline.py", 2, 1).count("PyTorch copies") == 2


def test_refusals(world: World, software_device: pathlib.Path) -> None:
    assert world("gpu_refusals.py", 1, 1).count("refusals hold") == 1


def test_a_rank_that_is_killed_during_a_copy_is_lost(software_device: pathlib.Path) -> None:
    command = [ronde_binary(), "run", "-np", "2", "--sidecars", "2", sys.executable, str(WORKERS / "gpu_killed.py")]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode != 0
    assert "rank 1 is lost" in done.stdout, done.stdout + done.stderr
    assert "the session is closed" in done.stdout, done.stdout + done.stderr
    assert "killed by signal" in done.stderr or "SIGKILL" in done.stderr, done.stderr


def test_a_forked_child_leaves_the_device_alone(world: World, software_device: pathlib.Path) -> None:
    assert world("gpu_forked.py", 1, 1).count("the child was refused") == 1


def checked(**variables: str) -> str:
    """The lines of `ronde check` about GPUs."""
    environment = {**os.environ, **variables}
    command = [ronde_binary(), "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if re.match(r"\S+ +(GPU|NCCL|peer access):", line)]
    return "\n".join(lines)


def test_a_host_is_checked(software_device: pathlib.Path) -> None:
    found = checked()
    assert found.startswith("ok    GPU: 0: software device (tests only) at 0000:01:00.0, 0 GiB; 1: "), found
    assert "the driver supports CUDA 12.4" in found
    assert "ok    NCCL: 2.23.4, " in found
    assert "ok    peer access: each GPU reads the others' memory directly" in found
    old = checked(RONDE_DEVICE_NCCL_VERSION="21703", RONDE_DEVICE_DRIVER_VERSION="11030", RONDE_DEVICE_COUNT="1")
    assert "warn  GPU: 0: software device" in old, old
    assert "install a driver for CUDA 11.4 or later" in old, old
    assert "warn  NCCL: libnccl.so.2 is of version 2.17.3" in old, old
    assert "peer access" not in old, old


def test_nccl_is_found_by_its_path(software_device: pathlib.Path) -> None:
    moved = software_device / "nccl-elsewhere.so"
    (software_device / "libnccl.so.2").rename(moved)
    assert f"ok    NCCL: 2.23.4, {moved}" in checked(RONDE_NCCL_LIBRARY=str(moved))
    assert "warn  NCCL: libnccl.so.2 cannot be opened (tried /nowhere): " in checked(RONDE_NCCL_LIBRARY="/nowhere")


def test_build_flags_ask_this_machine(software_device: pathlib.Path) -> None:
    pytest.importorskip("torch")
    program = "import ronde.torch as hvd; print(hvd.cuda_built(), hvd.rocm_built(), hvd.nccl_built())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["True", "False", "0"]


def test_a_missing_driver_is_named() -> None:
    program = ASKED.format("_ronde.gpu_of(4096)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    if "libcuda.so.1" not in done.stdout:
        pytest.skip("LEFT OUT: this machine has NVIDIA's driver")
    assert done.stdout.startswith("device libcuda.so.1 cannot be opened"), done.stdout
    assert "Install NVIDIA's driver" in done.stdout


def test_a_driver_without_a_device_is_named(software_device: pathlib.Path) -> None:
    program = ASKED.format("_ronde.gpus()")
    environment = {**os.environ, "RONDE_DEVICE_COUNT": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert done.stdout.startswith("device libcuda.so.1 is there, but no GPU can be used"), done.stdout


def test_variables_of_horovods_builds_are_named_once(
    world: World, software_device: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    variables = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_GPU_BROADCAST": "", "HOROVOD_GPU_ALLREDUCE": "MPI"}
    notes = ignored_variables.notes_of(variables)
    assert [note.partition(" ")[0] for note in notes] == ["HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_GPU_ALLREDUCE=MPI"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = "import ronde.torch as hvd; hvd.init(); hvd.shutdown(); hvd.init(); print('it ran')"
    command = [ronde_binary(), "run", "-np", "2", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True, env=environment)
    assert done.stdout.count("it ran") == 2
    for name in ("HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_GPU_ALLREDUCE=MPI"):
        assert done.stderr.count(f"{name} has no effect: nothing is compiled for GPUs") == 1, done.stderr


def test_strides_of_dense_arrays() -> None:
    for shape in [(), (3,), (2, 3), (4, 1, 5)]:
        assert device._dense_strides(shape, 8) == numpy.empty(shape).strides


class Array:
    """An array of another library, of a version without streams."""

    def __init__(self) -> None:
        self.__cuda_array_interface__ = {"version": 2, "shape": (2,), "typestr": "<f4", "data": (4096, False)}


def test_an_interface_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "staging_choice", lambda: "ronde")
    with pytest.raises(ValueError, match="version 2"):
        device.array_of(Array())


def test_arrays_of_other_libraries_need_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "staging_choice", lambda: "torch")
    with pytest.raises(ValueError, match="set RONDE_GPU_STAGING=ronde"):
        tensors.source_of(Array())


def test_an_interface_that_cannot_be_read_is_none() -> None:
    class Broken:
        @property
        def __cuda_array_interface__(self) -> None:
            raise RuntimeError("it is in main memory")

        __array_interface__ = numpy.ones(3).__array_interface__

    assert tensors.source_of(Broken()).shape == (3,)
    with pytest.raises(ValueError, match="a result can be written into"):
        tensors.target_of(Broken())


@pytest.mark.parametrize(("given", "is_by_torch"), [(None, True), ("ronde", False), ("torch", True)])
def test_who_copies_is_a_choice(monkeypatch: pytest.MonkeyPatch, given: str | None, is_by_torch: bool) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(device, "staging_choice", device.staging_choice.__wrapped__)
    monkeypatch.delenv("RONDE_GPU_STAGING", raising=False)
    if given is not None:
        monkeypatch.setenv("RONDE_GPU_STAGING", given)
    assert device.is_copied_by_torch.__wrapped__() is is_by_torch
    monkeypatch.setenv("RONDE_GPU_STAGING", "cuda")
    with pytest.raises(ValueError, match="RONDE_GPU_STAGING is 'cuda'"):
        device.is_copied_by_torch.__wrapped__()


def test_pytorch_copies_on_gpus_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from ronde.torch import rocm_built

    monkeypatch.setattr(device, "staging_choice", lambda: "ronde")
    assert not device.is_copied_by_torch.__wrapped__()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert device.is_copied_by_torch.__wrapped__()
    assert rocm_built()


class OnGpu:
    """Imitates a tensor on a GPU, and records the streams that use it."""

    dtype, shape, nbytes, device, used = "torch.float32", (2, 2), 16, "cuda:0", None

    def is_contiguous(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return 4096

    def copy_(self, other: Any) -> None:
        assert self.used is None

    def record_stream(self, stream: Any) -> None:
        self.used = stream


def test_memory_between_is_used_by_the_stream_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would give it to the stream of the submission while another one copies from it."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(device, "is_copied_by_torch", lambda: False)
    monkeypatch.setattr(device, "place_of", lambda tensor: device.DevicePlace(0, 0, tensor))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: "the stream of the wait")
    between = OnGpu()
    monkeypatch.setattr(torch, "empty", lambda *arguments, **options: between)
    tensor = OnGpu()
    target = tensors._cuda_target(tensor)  # type: ignore[arg-type]
    assert target.owner is between
    assert target.finish() is tensor
    assert (between.used, tensor.used) == ("the stream of the wait",) * 2
