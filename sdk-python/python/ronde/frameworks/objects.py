"""Exchange of Python objects between ranks, without a framework.

Objects are pickled, so receiving one executes code of its sender. Only the program requests this, never ronde itself.
Only ranks of this job can send, over encrypted links, but a program that receives objects trusts their sender with its
process.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import numpy

from ronde.frameworks import world
from ronde.frameworks.process_sets import ProcessSet, global_process_set, members_of, root_of

if TYPE_CHECKING:
    from ronde.client import Client
    from ronde.process_set import ProcessSet as JobSet

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

    Raises what `ronde.Client.broadcast` does, and on the root errors of pickling.
    """
    members, root = members_of(process_set), root_of(root_rank, process_set)
    return broadcast_by(world.current().client, members, obj, root, name)


def broadcast_by(client: Client, members: JobSet | None, obj: Any, root: int, name: str | None) -> Any:
    """`broadcast_object` by a client.

    members -- the ranks that take part; None for all
    root    -- a rank of the job
    """
    is_root = client.rank == root
    content = _pickled(obj) if is_root else numpy.zeros(0, dtype=numpy.uint8)
    length = numpy.array([content.size], dtype=numpy.int64)
    length = client.broadcast(length, root, _part(name, "sz"), process_set=members)
    if not is_root:
        content = numpy.zeros(int(length[0]), dtype=numpy.uint8)
    received = client.broadcast(content, root, _part(name, "t"), process_set=members)
    return obj if is_root else pickle.loads(received.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns all ranks' objects, in rank order. As `broadcast_object`; objects may differ in type and size."""
    client, members = world.current().client, members_of(process_set)
    content = _pickled(obj)
    length = numpy.array([content.size], dtype=numpy.int64)
    lengths = client.allgather(length, _part(name, "sz"), process_set=members)
    received = client.allgather(content, _part(name, "t"), process_set=members)
    ends = numpy.cumsum(lengths)
    return [pickle.loads(received[end - length : end].tobytes()) for length, end in zip(lengths, ends)]


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _pickled(obj: Any) -> Any:
    written = io.BytesIO()
    (pickle if cloudpickle is None else cloudpickle).dump(obj, written)
    return numpy.frombuffer(written.getvalue(), dtype=numpy.uint8)
