"""Run by each of two ranks on a software device: a session without shared memory lets PyTorch copy its tensors."""

from __future__ import annotations

from typing import Any

import gpu_torch
import numpy
import torch

import ronde
from ronde import staging


class Lease:
    """Imitates page-locked memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def to_device(lease: Any, tensor: gpu_torch.Tensor) -> gpu_torch.Tensor:
    """Imitates PyTorch's copy to a GPU."""
    tensor.array.write(lease.tensor.numpy())
    return tensor


def main() -> None:
    gpu_torch.stand_in()
    staging.from_device = lambda tensor: Lease(torch.from_numpy(tensor.array.read()))  # type: ignore[assignment]
    staging.for_device = lambda shape, dtype: Lease(torch.zeros(shape, dtype=dtype))  # type: ignore[assignment]
    staging.to_device = to_device  # type: ignore[assignment]
    client = ronde.connect(inline=True)
    tensor = gpu_torch.Tensor(numpy.ones(1000, "float32"))
    assert client.allreduce(tensor, ronde.Sum, out=tensor) is tensor
    assert (tensor.read() == client.size).all()
    together = [gpu_torch.Tensor(numpy.full(count, 1.0)) for count in (3, 7)]
    for result in client.grouped_allreduce(together, ronde.Sum, out=together):
        assert (result.read() == client.size).all()
    client.close()
    print("PyTorch copies")


if __name__ == "__main__":
    main()
