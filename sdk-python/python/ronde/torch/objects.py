"""Exchange of Python objects between ranks.

Objects are pickled, so receiving one executes code of its sender. Only the program requests this, never ronde itself.
Only ranks of this job can send, over encrypted links, but a program that receives objects trusts their sender with its
process. Parameters and optimizer state are not pickled: `broadcast_optimizer_state` sends JSON and tensors.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ronde.frameworks import world
from ronde.frameworks.process_sets import ProcessSet, global_process_set
from ronde.torch import gradients

try:  # If installed, cloudpickle also handles functions and classes of `__main__`.
    import cloudpickle
except ImportError:
    cloudpickle = None


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcasts the object of rank `root_rank`. Returns a copy on other ranks, and the object itself on the root.

    obj  -- any object that pickle accepts; with the package cloudpickle also functions and classes of the program
            itself. Only that of the root is used
    name -- identifies the operation on all ranks

    Raises what `broadcast` does, and on the root errors of pickling.
    """
    is_root = world.current().rank == root_rank
    received = broadcast_bytes(_pickled(obj) if is_root else None, root_rank, name, process_set)
    return obj if is_root else _unpickled(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns all ranks' objects, in rank order. As `broadcast_object`; objects may differ in type and size."""
    content = _pickled(obj)
    lengths = torch.tensor([content.numel()], dtype=torch.int64)
    lengths = _wait(gradients.begin_allgather(lengths, _part(name, "sz"), process_set))
    received = _wait(gradients.begin_allgather(content, _part(name, "t"), process_set))
    return [_unpickled(part) for part in torch.split(received, lengths.tolist())]


def broadcast_bytes(
    content: torch.Tensor | None, root_rank: int, name: str | None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Broadcasts the bytes of rank `root_rank`, as uint8 in one dimension. Only that rank passes and knows them."""
    if content is None:
        content = torch.zeros(0, dtype=torch.uint8)
    length = torch.tensor([content.numel()], dtype=torch.int64)
    length = _wait(gradients.begin_broadcast(length, root_rank, _part(name, "sz"), process_set))
    if world.current().rank != root_rank:
        content = torch.zeros(int(length), dtype=torch.uint8)
    received: torch.Tensor = _wait(gradients.begin_broadcast(content, root_rank, _part(name, "t"), process_set))
    return received


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _pickled(obj: Any) -> torch.Tensor:
    written = io.BytesIO()
    (pickle if cloudpickle is None else cloudpickle).dump(obj, written)
    return torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8)


def _unpickled(content: torch.Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())


def _wait(handle: int) -> Any:
    return world.synchronize(handle)
