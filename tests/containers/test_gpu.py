"""The image for GPUs: built on an image with PyTorch, and run without a GPU and with the software device."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

import pytest
from conftest import BUILD_S, Build
from engine import Engine
from project import ROOT

BASE = "ronde-test-gpu-base"
PYTHON = "ronde-test-python"
IMAGE = "ronde-test-gpu"
ALONE = ["run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
WORKERS = ROOT / "sdk-python" / "tests" / "workers"
ON_THE_HOST = """
import torch
import ronde.torch as hvd
hvd.init()
found = hvd.allreduce(torch.ones(3), op=hvd.Sum)
print("summed", found.tolist(), "built for CUDA:", torch.version.cuda is not None, flush=True)
"""
NCCL_NET = """
import ctypes, os
tables = ctypes.CDLL("lib%s.so" % ("nccl-net-" + os.environ["NCCL_NET_PLUGIN"]))
print("v8" if tables.ncclNetPlugin_v8 else None, os.environ["NCCL_NET"], flush=True)
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "nccl-net" in line}
print("loaded", *mapped, flush=True)
"""
ON_A_DEVICE = """
import numpy
import ronde
import software
client = ronde.connect()
software.use(client.local_rank)
array = software.DeviceArray(numpy.full(1000, client.rank + 1.0, "float32"), software.Stream())
client.allreduce(array, ronde.Sum, out=array)
print("summed", set(array.read().tolist()), "copies", software.count("copies") > 0, flush=True)
"""
Run = Callable[..., str]


@pytest.fixture(scope="session")
def run(docker: Engine, build: Build, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command in the image, with options of the engine before it."""
    build("python", PYTHON)
    file = ["-f", str(pathlib.Path(__file__).with_name("gpu-base.Dockerfile")), "--build-arg", f"PYTHON={PYTHON}"]
    network = ["--network", "host"] if docker.is_own else []
    docker.run("build", *network, *file, "-t", BASE, str(tmp_path_factory.mktemp("empty")), timeout_s=BUILD_S)
    # Builders without BuildKit build the frameworks, too.
    build("gpu", IMAGE, "--build-arg", f"GPU_BASE={BASE}", "--build-arg", "RONDE_FRAMEWORKS=")

    def run_in(*command: str, options: tuple[str, ...] = ()) -> str:
        return docker.run(*ALONE, *options, IMAGE, *command)

    return run_in


def test_a_missing_driver_is_named(run: Run) -> None:
    assert "ok    GPU: none; ronde takes tensors in host memory" in run("ronde", "check")
    # As in a container that has the device files and not the driver's libraries.
    found = run("ronde", "check", options=("--device", "/dev/null:/dev/nvidia0"))
    assert "warn  GPU: 1 device files, but libcuda.so.1 cannot be opened" in found, found


def test_horovods_names_are_there(run: Run) -> None:
    assert "[X] PyTorch" in run("horovodrun", "--check-build")
    assert "train_digits.py" in run("ls", "/examples/")
    assert "horovod.torch" in run("python3", "-c", "import horovod.torch; print(horovod.torch.__name__)")


def test_tensors_in_host_memory_are_reduced(run: Run) -> None:
    found = run("ronde", "run", "-np", "2", "python3", "-c", ON_THE_HOST)
    assert found.count("summed [2.0, 2.0, 2.0]") == 2, found


def test_the_net_plugin_is_where_nccl_searches(run: Run) -> None:
    found = run("ronde", "run", "-np", "1", "--nccl-net", "python3", "-c", NCCL_NET)
    assert "v8 ronde" in found, found
    prefix = run("sh", "-c", "dirname $(dirname $(command -v ronde))").strip()
    assert f"loaded {prefix}/share/ronde/nccl/libnccl-net-ronde.so" in found, found


def test_a_tensor_on_a_gpu_is_staged(run: Run, tmp_path: pathlib.Path) -> None:
    library = pathlib.Path(os.environ["RONDE_BIN"]).with_name("libronde_software_device.so")
    # The image's user is another one.
    tmp_path.chmod(0o755)
    for name in ("libcuda.so.1", "libnccl.so.2"):
        shutil.copy(library, tmp_path / name)
    device = ("-v", f"{tmp_path}:/device:ro", "-e", "LD_LIBRARY_PATH=/device", "-e", "RONDE_GPU_STAGING=ronde")
    assert "ok    GPU: 0: software device (tests only)" in run("ronde", "check", options=device)
    programs = ("-v", f"{WORKERS}:/workers:ro", "-e", "PYTHONPATH=/workers")
    found = run("ronde", "run", "-np", "2", "python3", "-c", ON_A_DEVICE, options=device + programs)
    assert found.count("summed {3.0} copies True") == 2, found
