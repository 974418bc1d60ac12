"""Training of a model of PyTorch on one rank."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import numpy
import torch

import ronde.torch as hvd
from ronde.spark.common.devices import check_alike, cuda_device
from ronde.spark.common.pickling import loads
from ronde.spark.torch import losses, models
from ronde.spark.torch.batches import Batch, Shapes, matched
from ronde.spark.torch.models import BEGUN, EPOCH, MODEL, PLANNED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ronde.spark.common.task import Task

OPTIMIZER = "optimizer"
"""The key of a checkpoint besides those in `models`."""


def train(task: Task) -> Any:
    """Trains on this rank. Returns, on rank 0, the history and the states of model and optimizer as bytes.

    Raises RuntimeError if some ranks have a GPU and others do not.
    """
    hvd.init()
    seed_all(task.settings["random_seed"])
    result = _Training(task).run()
    hvd.shutdown()
    return result


def seed_all(seed: int | None) -> None:
    """Seeds the generators of Python, NumPy and PyTorch with a number of this rank, unless it is None."""
    if seed is not None:
        random.seed(seed + hvd.rank())
        numpy.random.seed((seed + hvd.rank()) % 2**32)
        torch.manual_seed(seed + hvd.rank())


def device_of(use_gpu: bool) -> torch.device:
    """Returns the device of this rank: a GPU where all ranks have one. Raises RuntimeError where only some do."""
    has_gpu = torch.cuda.is_available() and use_gpu
    everybodys = hvd.allgather(torch.tensor([int(has_gpu)]), name="ronde.spark.devices").tolist()
    check_alike(everybodys)
    if not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", cuda_device(hvd.local_rank(), torch.cuda.device_count()))


def train_minibatch(
    model: Any,
    optimizer: Any,
    transform_outputs: Any,
    loss_fn: Any,
    inputs: Any,
    labels: Any,
    sample_weights: Any,
    begins: bool = True,
    ends: bool = True,
) -> tuple[Any, torch.Tensor]:
    """Makes one step. Returns outputs and loss. A program may give its own as `train_minibatch_fn`.

    transform_outputs -- returns outputs as a list and labels in their shapes
    loss_fn           -- returns the loss of (outputs, labels, sample_weights)
    inputs, labels    -- lists of tensors
    begins, ends      -- whether this is the first and the last one of the backward passes of a step
    """
    if begins:
        optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    loss.backward()
    if ends:
        optimizer.step()
    return outputs, loss


def at_most(steps: int, data: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of an epoch. Raises ValueError before one more than `steps`: it would have a step alone."""
    for index, columns in enumerate(data):
        if index >= steps:
            raise ValueError(f"the data module gave more than {steps} batches for an epoch of {steps}")
        yield columns


class _Training:
    def __init__(self, task: Task) -> None:
        self.task, payload = task, task.payload
        self.device = device_of(task.settings["use_gpu"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.model = models.model_of(payload["model"])
        optimizer = models.optimizer_of(payload["optimizer"], self.model)
        if payload["state"] is not None:
            state = models.state_of(payload["state"])
            self.model.load_state_dict(state[MODEL])
            optimizer.load_state_dict(state[OPTIMIZER])
        else:
            for group in optimizer.param_groups:
                group["lr"] *= hvd.size()
        # The optimizer keeps the parameters, whose data moves; its state is moved by its own loading.
        self.model.to(self.device)
        optimizer.load_state_dict(optimizer.state_dict())
        self.plain = optimizer
        self.optimizer = self._distributed(optimizer)
        labels = len(task.labels)
        extras = loads(payload["extras"])
        self.loss = losses.Losses(
            losses.functions_of(extras["loss"], extras["loss_constructors"], labels), task.settings["loss_weights"]
        ).to(self.device)
        self.metrics = losses.metrics_of(extras["metrics"], labels)
        for module in losses.modules_of(self.metrics):
            module.to(self.device)
        self.own_step = extras["train_minibatch_fn"]
        self.shapes = Shapes(
            task.features,
            task.labels,
            task.weight,
            task.settings["input_shapes"],
            task.settings["label_shapes"],
            task.settings["categorical_cols"] or (),
        )

    def _distributed(self, optimizer: Any) -> Any:
        settings = self.task.settings
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return hvd.DistributedOptimizer(
            optimizer,
            named_parameters=self.model.named_parameters(),
            compression=settings["gradient_compression"] or hvd.Compression.none,
            backward_passes_per_step=settings["backward_passes_per_step"],
        )

    def run(self) -> Any:
        task = self.task
        history = []
        with task.data(hvd.rank(), hvd.size()) as data:
            train_data = data.train_data()
            val_data = data.val_data() if task.has_val else None
            for epoch in range(task.first_epoch, task.last_epoch):
                entry: dict[str, Any] = {"epoch": epoch, "train": self._train_epoch(train_data)}
                if val_data is not None:
                    entry["validation"] = self._validate(val_data)
                history.append(entry)
                self._end_epoch(epoch + 1, entry)
        if hvd.rank() != 0:
            return None
        return {"history": history, "state": self._state(task.last_epoch)}

    def _train_epoch(self, data: Iterable[Any]) -> dict[str, Any]:
        self.model.train()
        sums = self._sums()
        for index, columns in enumerate(at_most(self.task.train_steps, data)):
            batch = self.shapes.batch(columns, self.device)
            outputs, loss = self._step(index, batch)
            self._add(sums, batch, outputs, loss)
        return self._averages(sums, self.task.train_steps)

    def _step(self, index: int, batch: Batch) -> tuple[Any, torch.Tensor]:
        arguments = (self.model, self.optimizer, matched, self.loss, batch.inputs, batch.labels, batch.weights)
        if self.own_step is not None:
            outputs, loss = self.own_step(*arguments)
            return outputs, loss
        passes = self.task.settings["backward_passes_per_step"]
        # The last step of an epoch may have fewer passes, on all ranks alike.
        is_last = (index + 1) % passes == 0 or index + 1 == self.task.train_steps
        return train_minibatch(*arguments, begins=index % passes == 0, ends=is_last)

    @torch.no_grad()
    def _validate(self, data: Iterable[Any]) -> dict[str, Any]:
        self.model.eval()
        sums = self._sums()
        for columns in at_most(self.task.val_steps, data):
            batch = self.shapes.batch(columns, self.device)
            outputs, labels = matched(self.model(*batch.inputs), batch.labels)
            self._add(sums, batch, outputs, self.loss(outputs, labels, batch.weights))
        return self._averages(sums, self.task.val_steps)

    def _sums(self) -> Any:
        """Batches, rows, and the sums of the loss and all metrics over rows."""
        return torch.zeros(3 + sum(map(len, self.metrics)), dtype=torch.float64)

    @torch.no_grad()
    def _add(self, sums: Any, batch: Batch, outputs: Any, loss: torch.Tensor) -> None:
        sums[0] += 1
        sums[1] += batch.rows
        sums[2] += float(loss.detach()) * batch.rows
        position = 3
        outputs, labels = matched(outputs, batch.labels)
        for functions, output, label in zip(self.metrics, outputs, labels):
            for function in functions:
                sums[position] += float(torch.as_tensor(function(output.detach(), label)).double().mean()) * batch.rows
                position += 1

    def _averages(self, sums: Any, steps: int) -> dict[str, Any]:
        """Averages over the rows of all ranks."""
        if int(sums[0]) != steps:
            raise ValueError(f"the data module gave {int(sums[0])} batches for an epoch of {steps}")
        total = hvd.allreduce(sums, op=hvd.Sum, name="ronde.spark.metrics")
        averages = (total[2:] / total[1]).tolist()
        found: dict[str, Any] = {"loss": averages[0]}
        position = 1
        for label, functions in zip(self.task.labels, self.metrics):
            for index, function in enumerate(functions):
                found[f"{label}_{losses.name_of(function, index)}"] = averages[position]
                position += 1
        return found

    def _state(self, epoch: int) -> bytes:
        return models.state_bytes(
            {
                MODEL: {name: value.cpu() for name, value in self.model.state_dict().items()},
                OPTIMIZER: self.plain.state_dict(),
                EPOCH: epoch,
                BEGUN: self.task.begun_epoch,
                PLANNED: self.task.last_epoch,
            }
        )

    def _end_epoch(self, done: int, entry: dict[str, Any]) -> None:
        """Calls callbacks on all ranks. On rank 0 writes the checkpoint and prints metrics."""
        for callback in self.task.settings["callbacks"] or []:
            callback(self.model, done, entry)
        if hvd.rank() != 0:
            return
        if self.task.settings["verbose"] > 0:
            print(f"epoch {done}/{self.task.last_epoch}: {entry}", flush=True)
        remote = self.task.remote
        if remote.saving_runs:
            with remote.get_local_output_dir() as folder:
                with open(os.path.join(folder, remote.checkpoint_filename), "wb") as file:
                    file.write(self._state(done))
                remote.sync(folder)
