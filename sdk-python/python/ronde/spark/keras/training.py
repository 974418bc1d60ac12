"""Training of a model of Keras on one rank."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import keras
import numpy

import ronde.keras as hvd
from ronde.frameworks.keras.callbacks import learning_rate
from ronde.keras.backend import backend
from ronde.spark.common.devices import check_alike, cuda_device
from ronde.spark.common.pickling import loads
from ronde.spark.keras import models
from ronde.spark.keras.batches import batch_of, endless, shapes_of

if TYPE_CHECKING:
    from ronde.spark.common.store import RemoteStore
    from ronde.spark.common.task import Task


def train(task: Task) -> Any:
    """Trains on this rank. Returns, on rank 0, the history and the model as bytes.

    Raises RuntimeError if some ranks have a GPU and others do not.
    """
    hvd.init()
    use_device(task.settings["use_gpu"])
    if task.settings["random_seed"] is not None:
        keras.utils.set_random_seed((task.settings["random_seed"] + hvd.rank()) % 2**32)
    remote = task.remote
    with remote.get_local_output_dir() as folder, task.data(hvd.rank(), hvd.size()) as data:
        result = _fit(task, data, folder)
    hvd.shutdown()
    return result


def use_device(use_gpu: bool) -> None:
    """Chooses this rank's GPU, where all ranks have one. Raises RuntimeError where only some do."""
    count = _gpus() if use_gpu else 0
    everybodys = numpy.asarray(hvd.allgather(numpy.array([int(count > 0)]), name="ronde.spark.devices")).tolist()
    check_alike(everybodys)
    if keras.backend.backend() == "tensorflow":
        import tensorflow

        devices = tensorflow.config.list_physical_devices("GPU")
        chosen = [devices[cuda_device(hvd.local_rank(), count)]] if count else []
        for device in chosen:
            tensorflow.config.experimental.set_memory_growth(device, True)
        tensorflow.config.set_visible_devices(chosen, "GPU")
    elif count:
        import torch

        torch.cuda.set_device(cuda_device(hvd.local_rank(), count))


def _gpus() -> int:
    """How many GPUs the back end sees."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow

        return len(tensorflow.config.list_physical_devices("GPU"))
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _fit(task: Task, data: Any, folder: str) -> Any:
    extras = loads(task.payload["extras"])
    known = extras["custom_objects"]
    model = models.model_of(task.payload["model"], known)
    optimizer = _compiled(task, model, extras, known)
    shapes = shapes_of(model, len(task.features))
    convert = functools.partial(
        batch_of,
        features=task.features,
        shapes=shapes,
        labels=task.labels,
        label_shapes=task.settings["label_shapes"],
        weight=task.weight,
    )
    validation = {}
    if task.has_val:
        validation = {"validation_data": endless(data.val_data(), convert), "validation_steps": task.val_steps}
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    mine = _callbacks(task.remote, extras, folder)
    last = _EndOfEpoch(task, optimizer, folder, extras["checkpoint_callback"] is not None)
    fitted = model.fit(
        endless(data.train_data(), convert),
        steps_per_epoch=task.train_steps,
        epochs=task.last_epoch,
        initial_epoch=task.first_epoch,
        verbose=task.settings["verbose"] if hvd.rank() == 0 else 0,
        callbacks=[*callbacks, *mine, last],
        **validation,
    )
    if hvd.rank() != 0:
        return None
    history = {name: [float(value) for value in values] for name, values in fitted.history.items()}
    return {"history": history, "model": last.best() or models.model_bytes(model)}


def _compiled(task: Task, model: Any, extras: dict[str, Any], known: dict[str, Any]) -> Any:
    """Compiles the model. Returns its optimizer, which averages gradients."""
    optimizer = models.unpacked(extras["optimizer"], known)
    _, variables = models.state_of(task.payload["model"])
    if variables:
        models.set_variables(optimizer, model, variables)
    else:
        optimizer.learning_rate = learning_rate(optimizer, backend) * hvd.size()
    # The optimizer within a LossScaleOptimizer is made again by its name.
    with keras.saving.custom_object_scope(known):
        wrapped = hvd.DistributedOptimizer(
            optimizer, compression=task.settings["gradient_compression"] or hvd.Compression.none
        )
    # On GPUs Keras would have XLA compile the step, and XLA compiles no collectives for GPUs.
    options = {"jit_compile": False} if keras.backend.backend() == "tensorflow" else {}
    model.compile(optimizer=wrapped, **models.unpacked(extras["compilation"], known), **options)
    return wrapped


def _callbacks(remote: RemoteStore, extras: dict[str, Any], folder: str) -> list[Any]:
    """The program's callbacks on this rank, with the paths of this run."""
    kept = []
    for callback in extras["callbacks"] or []:
        if isinstance(callback, keras.callbacks.TensorBoard):
            if hvd.rank() != 0:
                continue
            callback.log_dir = os.path.join(folder, remote.logs_subdir)
        kept.append(callback)
    checkpoint = extras["checkpoint_callback"]
    if checkpoint is not None and hvd.rank() == 0:
        checkpoint.filepath = os.path.join(folder, BEST)
        kept.append(checkpoint)
    return kept


BEST = "best.keras"
"""The local file of the program's own checkpoint callback."""


class _EndOfEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes the checkpoint, and other files of rank 0, to the store after each epoch."""

    def __init__(self, task: Task, optimizer: Any, folder: str, has_own: bool) -> None:
        super().__init__()
        self._task, self._optimizer, self._folder, self._has_own = task, optimizer, folder, has_own

    def best(self) -> bytes | None:
        """Returns the model of the program's checkpoint callback, if it has saved one."""
        path = os.path.join(self._folder, BEST)
        if not self._has_own or not os.path.exists(path):
            return None
        with open(path, "rb") as file:
            return file.read()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the checkpoint."""
        del logs
        remote = self._task.remote
        if hvd.rank() != 0 or not remote.saving_runs:
            return
        content = models.model_bytes(self.model)
        state = {"epoch": epoch + 1, "begun": self._task.begun_epoch, "planned": self._task.last_epoch}
        with open(os.path.join(self._folder, remote.checkpoint_filename), "wb") as file:
            file.write(models.with_state(content, self._optimizer, state))
        remote.sync(self._folder)
