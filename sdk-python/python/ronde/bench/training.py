"""Training steps on one rank: the same model, data and optimizer, and several modes of reducing gradients."""

from __future__ import annotations

import copy
import hashlib
import time
from typing import TYPE_CHECKING, Any, Callable

import numpy
import torch
import torch.distributed
from torch import nn

from ronde.bench.models import KINDS
from ronde.bench.named import Named
from ronde.bench.training_modes import ALONE, BARRIER, CODEC, DDP, DDP_RONDE, RONDE

if TYPE_CHECKING:
    from ronde.bench.backends import Backend

# Relative to the largest gradient of a tensor. Gradients of deep networks amplify rounding errors of float32.
GRADIENT_TOLERANCE = 1e-4
LEARNING_RATE = 0.01


class Trainer:
    """The models of one rank, one for each training mode."""

    def __init__(self, backend: Backend, model: str, batch: int, seed: int, modes: list[str]) -> None:
        torch.set_num_threads(1)
        self.backend = backend
        self.kind = KINDS[model]
        self.batch = batch
        self.seed = seed
        self.modes = {mode: _TrainingMode(mode, backend, self._model()) for mode in modes}

    def train_check(self, mode: str, step: int) -> dict[str, Any]:
        """Makes a step and compares its gradients with the mean of those computed locally from all ranks' data."""
        ranks = 1 if mode == ALONE else self.backend.ranks
        own = self.modes[mode]
        alone = copy.deepcopy(own.model)
        expected = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in alone.parameters()]
        for rank in range(ranks) if ranks > 1 and mode != BARRIER else [self.backend.rank]:
            alone.zero_grad()
            _loss(alone, *self._sample(rank, step)).backward()
            for index, parameter in enumerate(alone.parameters()):
                assert parameter.grad is not None  # every parameter takes part
                expected[index] += parameter.grad
        share = 1.0 if mode == BARRIER else 1.0 / ranks
        wrong = None
        own.gradients(*self._sample(self.backend.rank, step))
        # Gradients of codecs have no reference. The comparison of parameters at the end covers them.
        compared = [] if mode.startswith(CODEC) else expected
        for (name, parameter), total in zip(own.model.named_parameters(), compared):
            assert parameter.grad is not None
            wrong = wrong or _find_wrong(name, parameter.grad, total * share)
        own.apply()
        return {"wrong": wrong} if wrong else {}

    def train_steps(self, mode: str, first: int, steps: int) -> dict[str, Any]:
        """Times steps, after one untimed step."""
        own = self.modes[mode]
        samples = [self._sample(self.backend.rank, first + step) for step in range(steps)]
        if mode != ALONE:
            self.backend.barrier()
        own.step(*samples[0])
        nanoseconds = []
        for sample in samples:
            start = time.perf_counter_ns()
            own.step(*sample)
            nanoseconds.append(time.perf_counter_ns() - start)
        return {"nanoseconds": nanoseconds}

    def train_digest(self, mode: str) -> dict[str, Any]:
        """Returns a digest of the parameters' bits, for the comparison between ranks."""
        digest = hashlib.sha256()
        for parameter in self.modes[mode].model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        return {"digest": digest.hexdigest()}

    def train_parameters(self, mode: str) -> dict[str, Any]:
        """Returns the number of trained parameters."""
        return {"parameters": sum(parameter.numel() for parameter in self.modes[mode].model.parameters())}

    def _model(self) -> nn.Module:
        # The same for all ranks and modes.
        torch.manual_seed(self.seed)
        return self.kind.make()

    def _sample(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = numpy.random.Generator(numpy.random.PCG64([self.seed, rank, step]))
        images = generator.random((self.batch, *self.kind.shape), dtype=numpy.float32)
        labels = generator.integers(0, self.kind.classes, self.batch)
        return torch.from_numpy(images), torch.from_numpy(labels)


class _TrainingMode:
    """A model in one training mode."""

    def __init__(self, mode: str, backend: Backend, model: nn.Module) -> None:
        self.model = model
        self._forward: Callable[[torch.Tensor], torch.Tensor] = model
        self._optimizer: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self._barrier = backend.barrier if mode == BARRIER else None
        self._is_ronde = mode == RONDE or mode.startswith(CODEC)
        if mode in (DDP, DDP_RONDE):
            self._forward = _parallel(mode, model)
        elif self._is_ronde:
            import ronde.torch

            # A codec identifies a tensor by name, and the model of each mode has separate tensors.
            named = [(f"{mode} {name}", parameter) for name, parameter in model.named_parameters()]
            self._optimizer = ronde.torch.DistributedOptimizer(
                self._optimizer, named_parameters=named, compression=_compression(mode)
            )
            ronde.torch.broadcast_parameters(model.state_dict(), root_rank=0)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Makes a whole step."""
        self._backward(images, labels)
        self._optimizer.step()

    def gradients(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Runs the first part of a step: computes the gradients for the optimizer."""
        self._backward(images, labels)
        if self._is_ronde:
            self._optimizer.synchronize()

    def apply(self) -> None:
        """Runs the rest of a step after `gradients`."""
        if not self._is_ronde:
            self._optimizer.step()
            return
        with self._optimizer.skip_synchronize():
            self._optimizer.step()

    def _backward(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        _loss(self._forward, images, labels).backward()
        if self._barrier is not None:
            self._barrier()


def _parallel(mode: str, model: nn.Module) -> nn.Module:
    if mode == DDP_RONDE:
        from ronde.torch import distributed

        distributed.init_process_group()
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _compression(mode: str) -> Any:
    from ronde.torch import Compression

    if mode == RONDE:
        return Compression.none
    codec = Named.parse(mode[len(CODEC) :])
    return Compression.plugin(codec.name, **dict(codec.parameters))


def _loss(forward: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(forward(images), labels)


def _find_wrong(name: str, got: torch.Tensor, expected: torch.Tensor) -> dict[str, Any] | None:
    limit = GRADIENT_TOLERANCE * expected.abs().max()
    # NaN is not within the limit.
    bad = ~((got - expected).abs() <= limit).flatten()
    if not bad.any():
        return None
    index = int(bad.to(torch.uint8).argmax())
    return {
        "parameter": name,
        "element": index,
        "got": float(got.flatten()[index]),
        "expected": float(expected.flatten()[index]),
    }
