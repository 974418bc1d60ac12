"""The models of `ronde bench train` for images, and the benchmark script that Horovod's users know by its name."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch
from conftest import PACKAGE, ronde_binary

from ronde.bench.models import KINDS
from ronde.bench.training_modes import BATCHES

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "pytorch_synthetic_benchmark.py"
TIMEOUT_S = 240


# Those of the works; VGG-16 with a first linear layer for images of 32 by 32.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet50", 25_557_032), ("resnet101", 44_549_160), ("vgg16", 37_694_248), ("inception3", 23_834_568)],
)
def test_models_have_the_parameters_of_their_works(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = KINDS[name].make()
        images = torch.empty(2, *KINDS[name].shape)
        assert model(images).shape == (2, KINDS[name].classes)
    assert sum(each.numel() for each in model.parameters()) == parameters
    assert name in BATCHES


@pytest.mark.parametrize("flags", [[], ["--fp16-allreduce"], ["--use-adasum"]])
def test_the_benchmark_of_horovods_name_reports_images_per_second(flags: list[str]) -> None:
    small = ["--image-size", "32", "--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "1"]
    command = [ronde_binary(), "run", "-np", "2", sys.executable, str(EXAMPLE), "--num-iters", "2", *small, *flags]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for line in ["Model: resnet50", "Batch size: 2", "Number of CPUs: 2", r"Iter #1: \d+\.\d img/sec per CPU"]:
        assert re.search(line, done.stdout), done.stdout
    each = re.search(r"Img/sec per CPU: (\d+\.\d) ", done.stdout)
    total = re.search(r"Total img/sec on 2 CPU\(s\): (\d+\.\d) ", done.stdout)
    assert each, done.stdout
    assert total, done.stdout
    assert abs(float(total[1]) - 2 * float(each[1])) <= 0.2


def test_an_unknown_model_is_named() -> None:
    command = [sys.executable, str(EXAMPLE), "--model", "nothing"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert re.search(r"no model nothing: without torchvision there are|torchvision has no model nothing", done.stderr)
