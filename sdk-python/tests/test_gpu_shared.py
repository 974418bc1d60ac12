"""The sidecar runs NCCL on device memory that workers share with it, on the software device of `tests/device`.

The device shows order, failures and lifetimes; no figure is taken from it.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Callable

import pytest
from conftest import PACKAGE, WORKERS, gpu_pages, ronde_binary

World = Callable[..., str]


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_host_by_nccl_alone(world: World, three_devices: None, ranks: int) -> None:
    output = world("gpu_shared.py", ranks, 1, options=["--gpu"])
    assert output.count("NCCL holds") == ranks
    (page,) = gpu_pages(output)
    assert page["gpus"] == 3
    assert page["nccl"] == "2.23.4"
    assert page["nccl_operations"] > 40
    assert page["copied_operations"] > 0, "16-bit integers, and the mixed one"
    assert page["imported_bytes"] > 0


def test_elastic_jobs_are_refused_by_name(three_devices: None) -> None:
    command = [
        ronde_binary(),
        "run",
        "-np",
        "2",
        "--min-np",
        "1",
        "-H",
        "localhost:2",
        "--gpu",
        sys.executable,
        "-c",
        "",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "--gpu serves jobs whose workers stay, and this one is elastic" in done.stderr, done.stderr
    assert "RONDE_GPU_LEVELS=auto" in done.stderr, done.stderr


def test_two_ranks_on_one_gpu_are_copied(world: World, three_devices: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_TEST_GPU", "0")
    output = world("gpu_shared.py", 2, 1, options=["--gpu"])
    assert output.count("NCCL holds") == 2
    (page,) = gpu_pages(output)
    assert page["nccl_operations"] == 0
    assert page["copied_operations"] > 40


def run(
    script: str, ranks: int, *arguments: str, options: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    job = [ronde_binary(), "run", "-np", str(ranks), "--gpu", *options]
    command = [*job, sys.executable, str(WORKERS / script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment)


def test_a_killed_worker_is_reported_and_its_neighbours_data_stay(three_devices: None) -> None:
    done = run("gpu_shared_killed.py", 3)
    assert done.returncode != 0
    assert done.stdout.count("the lost rank was reported") == 2, done.stdout + done.stderr
    assert done.stdout.count("the session is closed") == 2, done.stdout + done.stderr


def test_a_sidecar_without_a_driver_reports_it_and_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    # In a new process, as this one searches where LD_LIBRARY_PATH pointed when it began.
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"]
    if subprocess.run(load, capture_output=True, timeout=60, check=False).returncode == 0:
        pytest.skip("LEFT OUT: this machine has NVIDIA's driver")
    done = run("collectives.py", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"the sidecar uses no GPU, so workers copy[^\n]*", done.stderr)
    assert len(found) == 1, done.stderr
    assert "libcuda.so.1 cannot be opened" in done.stderr, done.stderr


def test_a_sidecar_with_an_old_nccl_reports_it_and_workers_copy(
    world: World, three_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RONDE_DEVICE_NCCL_VERSION", "21703")
    done = run("gpu_collectives.py", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("devices hold") == 2
    found = re.findall(r"the sidecar uses no GPU, so workers copy[^\n]*", done.stderr)
    assert len(found) == 1, done.stderr
    assert "is of version 2.17.3" in done.stderr


def test_tensors_without_room_on_the_device_are_copied_to_shared_memory(
    world: World, three_devices: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("gpu_shared_full.py", 2, RONDE_DEVICE_FAIL="cuMemCreate=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("copied instead") == 2
    # Once in each process, though it has several tensors.
    assert done.stderr.count("the tensor is not shared with the sidecar, but copied to shared memory") == 2, done.stderr
    assert "the GPU is out of memory: cuMemCreate" in done.stderr


def test_copies_that_do_not_fit_the_host_wait_for_those_before_them(three_devices: None) -> None:
    """More tensors are copied through the host than --arena-mb allows for all workers."""
    done = run("gpu_shared_many.py", 2, options=("--arena-mb", "64"), RONDE_DEVICE_COPY_DELAY_US="2000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all were copied") == 2, done.stdout + done.stderr


def test_a_copy_that_fails_ends_the_epoch_with_its_reason(three_devices: None) -> None:
    """Others are in flight then; the sidecar goes on until all ranks have the reason."""
    done = run(
        "gpu_shared_failing.py",
        2,
        "copied",
        RONDE_DEVICE_FAIL="cuMemcpyDtoHAsync_v2=2@4",
        RONDE_DEVICE_COPY_DELAY_US="2000",
    )
    assert done.stdout.count("the failure of the device is reported") == 2, done.stdout + done.stderr


def test_a_failure_of_nccl_is_an_error_of_all_ranks(three_devices: None) -> None:
    done = run("gpu_shared_failing.py", 2, RONDE_DEVICE_FAIL="ncclGroupEnd=3@3")
    assert done.stdout.count("the failure of the device is reported") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("levels", ["2", "auto"])
def test_two_levels_and_nccl_in_the_sidecar_exclude_each_other(three_devices: None, levels: str) -> None:
    done = run("gpu_shared_refused.py", 2, RONDE_GPU_LEVELS=levels)
    assert done.stdout.count(f"refused: RONDE_GPU_LEVELS={levels} makes workers run NCCL, but") == 2, (
        done.stdout + done.stderr
    )


def test_descriptors_of_others_are_refused(world: World, three_devices: None) -> None:
    assert world("gpu_shared_refusals.py", 2, 1, options=["--gpu"]).count("refusals hold") == 2


ALLOCATED = """
import ctypes
from ronde import _ronde
library = ctypes.CDLL(_ronde.__file__)
allocate, free = library.ronde_gpu_malloc, library.ronde_gpu_free
allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
address = allocate(1000, 1, None)
assert _ronde.gpu_of(address) == 1 and _ronde.gpu_of(address + 999) == 1
free(address, 1000, 1, None)
free(None, 0, 0, None)
free(4096, 1000, 1, None)
print(allocate(1 << 40, 0, None), allocate(-1, 0, None), allocate(1000, 9, None))
"""


def test_pytorch_allocates_by_functions_of_the_module(software_device: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALLOCATED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["None"] * 3


def test_a_pool_needs_pytorch_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from ronde.torch import gpu_pool

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="has no memory pools on GPUs here"), gpu_pool():
        pass


def test_arrays_on_gpus_refuse_what_they_cannot_be() -> None:
    import ronde

    with pytest.raises(ValueError, match="no type that an array on a GPU can have"):
        ronde.GpuArray(4, "bfloat16", 0)
    with pytest.raises(ValueError, match="dimensions are integers from 0"):
        ronde.GpuArray((4, -1), "float32", 0)
    assert ronde.GpuArray(0, "float32", 0).__cuda_array_interface__["data"] == (0, False)
