"""Run by every rank: gradients whose memory becomes the result's have the bits of gradients that are copied."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn

import ronde.torch as hvd
from ronde.torch import mpi_ops

STEPS = 4
Setup = dict[str, Any]


class Model(nn.Module):
    """Weights above and below 64 KiB; one shared, one frozen, one unused, one in another order of strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 200)
        self.again = nn.Linear(200, 200)
        self.frozen = nn.Linear(200, 200)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(200, 200)
        self.tied = nn.Linear(200, 200)
        self.tied.weight = self.again.weight
        self.image = nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Through all of it."""
        hidden = self.tied(torch.tanh(self.frozen(torch.tanh(self.again(torch.tanh(self.first(rows)))))))
        image = rows[:, :64].reshape(-1, 64, 1, 1).expand(-1, 64, 3, 3).to(memory_format=torch.channels_last)
        return hidden.square().mean() + self.image(image).square().mean()


def rows_of(step: int) -> torch.Tensor:
    """This rank's batch."""
    return torch.randn(8, 128, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))


def train(
    passes: int = 1,
    set_to_none: bool = True,
    compression: Any = hvd.Compression.none,
    dtype: torch.dtype = torch.float32,
    before: Callable[[nn.Module, Any], None] | None = None,
    between: Callable[[nn.Module, Any], None] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> list[torch.Tensor]:
    """Trains; gives the weights and the last gradients.

    before, between -- what is done after the backward passes, and after the gradients are reduced
    """
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=named, compression=compression, backward_passes_per_step=passes
    )
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for each in range(passes):
            loss = model(rows_of(step * passes + each).to(dtype))
            (loss if scaler is None else scaler.scale(loss)).backward()
        if before is not None:
            before(model, optimizer)
        optimizer.synchronize()
        # A result is copied to a gradient that the program has put in the place of the one that is reduced.
        check_layout(model, compression is hvd.Compression.none and before is not replace_gradients)
        if between is not None:
            between(model, optimizer)
        with optimizer.skip_synchronize():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    kept += [parameter.grad.clone() for _, parameter in named if parameter.grad is not None]
    optimizer.zero_grad()
    return kept


def check_layout(model: Model, may_be_mapped: bool) -> None:
    """Gradients are where they should be, in the order of their parameters."""
    used = mpi_ops.client().shared_memory
    assert (used.slots > 0) == (is_mapped() and may_be_mapped and hvd.size() > 1), used
    assert model.frozen.weight.grad is None
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is None or gradient.stride() == parameter.stride(), name


def is_mapped() -> bool:
    """Whether this session leaves results in shared memory."""
    return _mapped


def replace_gradients(model: nn.Module, optimizer: Any) -> None:
    """As a user may, before they are reduced."""
    del optimizer
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def clip(model: nn.Module, optimizer: Any) -> None:
    """In place."""
    del optimizer
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def scenarios() -> dict[str, list[torch.Tensor]]:
    """All ways to train, in this session."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {
        "plain": train(),
        "accumulated": train(passes=3),
        "zeroed": train(set_to_none=False),
        "clipped": train(between=clip),
        "scaled": train(scaler=scaler, between=lambda _, optimizer: scaler.unscale_(optimizer)),
        "compressed": train(compression=hvd.Compression.fp16),
        "bfloat16": train(dtype=torch.bfloat16),
        "float64": train(dtype=torch.float64),
        "replaced": train(before=replace_gradients),
    }


def check_flat() -> None:
    """Gradients that are parts of one buffer stay there."""
    weights = [nn.Parameter(torch.zeros(200, 200)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0), named_parameters=[(f"w{index}", each) for index, each in enumerate(weights)]
    )
    flat = torch.zeros(2 * 200 * 200)
    for index, weight in enumerate(weights):
        weight.grad = flat[index * 40_000 : (index + 1) * 40_000].view(200, 200)
    sum(weight.sum() * (hvd.rank() + 1) for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.synchronize()
    assert torch.equal(flat, torch.full_like(flat, (hvd.size() + 1) / 2))


def check_tensors() -> None:
    """PyTorch's types, and what users do with tensors."""
    size = hvd.size()
    for dtype in (torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool):
        tensor = torch.ones(300, 300, dtype=dtype)
        result = hvd.allreduce(tensor, op=hvd.Max)
        assert (result.dtype, result.shape) == (dtype, tensor.shape)
        assert torch.equal(result, tensor), dtype
        result.zero_()
        del result
    leaf = torch.ones(300, 300)
    result = hvd.allreduce(leaf, op=hvd.Sum)
    result.requires_grad_()
    (result * 2).sum().backward()
    assert result.grad is not None
    moved = result.detach().share_memory_().clone()
    assert torch.equal(moved, torch.full((300, 300), float(size)))
    del result, moved
    assert mpi_ops.client().shared_memory.slots == 0


_mapped = True


def main() -> None:
    """Once each way."""
    global _mapped  # noqa: PLW0603
    torch.set_num_threads(1)
    found = []
    for mapped in (True, False):
        _mapped = mapped
        hvd.init(mapped=mapped)
        found.append(scenarios())
        check_flat()
        assert mpi_ops.client().shared_memory.slots == 0
        check_tensors()
        print(f"rank {hvd.rank()}: gradients are the same", flush=True)
        hvd.barrier()
        hvd.shutdown()
    for what, kept in found[0].items():
        for index, (left, right) in enumerate(zip(kept, found[1][what])):
            assert torch.equal(left, right), (what, index)
        assert len(kept) == len(found[1][what])


if __name__ == "__main__":
    main()
