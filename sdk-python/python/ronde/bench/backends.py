"""The compared libraries, with a common interface."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import TYPE_CHECKING, Any, Callable, Protocol

import numpy

from ronde.bench.data import ROOT_RANK
from ronde.bench.named import Extras
from ronde.submission import MAPPED_BYTES_MIN

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]
    # Performs the collective on a fixed input. Returns this rank's result, an array or a tensor in main memory.
    Operation = Callable[[], Any]

# The target of a result: the input; preallocated memory; memory that the call allocates.
IN_PLACE, INTO, NEW = "in place", "into", "new"
# The input is in shared memory already, and the result stays there.
SHARED = "shared"
# The codec or reducer of a result, as on the command line. The call allocates the memory.
CODEC, REDUCER = "codec ", "reducer "


class Prepared:
    """An operation on a copy of its input; `prepare` copies the elements."""

    def __init__(self, operation: Operation, prepare: Callable[[], Any]) -> None:
        self._operation = operation
        self.prepare = prepare

    def __call__(self) -> Any:
        """Performs the operation."""
        return self._operation()


class Backend(Protocol):
    """A rank's connection to the others through one library."""

    rank: int
    ranks: int
    versions: dict[str, str]

    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    def operations(self, collective: str, tensor: Array) -> dict[str, Operation]:
        """Returns the variants of a collective on a float32 input, by the target of the result; the default first."""

    def close(self) -> None:
        """Closes the connection."""


class Ronde:
    """ronde through the client of `ronde.torch`, with tensors, which it converts faster than arrays."""

    def __init__(self, extras: Extras) -> None:
        import torch

        import ronde.torch

        self._extras = extras

        torch.set_num_threads(1)
        ronde.torch.init()
        self._torch, self._library = torch, ronde.torch
        self.rank, self.ranks = ronde.torch.rank(), ronde.torch.size()
        self.versions = {"ronde": ronde.__version__, "torch": str(torch.__version__)}

    def barrier(self) -> None:
        """Runs a barrier of the client."""
        self._library.barrier()

    def operations(self, collective: str, tensor: Array) -> dict[str, Operation]:
        """Returns variants with results in the caller's memory, and, except for broadcast, in the client's memory."""
        client, total = self._library.mpi_ops.client(), self._library.Sum
        whole = self._torch.from_numpy(tensor)
        share = len(tensor) // self.ranks
        part = whole[:share]
        out = self._torch.empty(share if collective == "reduce_scatter" else len(tensor))
        return {
            "allreduce": {
                IN_PLACE: lambda: client.allreduce(whole, total, out=whole),
                NEW: lambda: client.allreduce(whole, total),
                **self._shared(whole),
                **self._plugged(whole),
            },
            "broadcast": {IN_PLACE: lambda: client.broadcast(whole, ROOT_RANK, out=whole)},
            "allgather": {INTO: lambda: client.allgather(part, out=out), NEW: lambda: client.allgather(part)},
            "reduce_scatter": {
                INTO: lambda: client.reduce_scatter(whole, total, out=out),
                NEW: lambda: client.reduce_scatter(whole, total),
            },
            "alltoall": {INTO: lambda: client.alltoall(whole, out=out), NEW: lambda: client.alltoall(whole)},
        }[collective]

    def _shared(self, whole: Any) -> dict[str, Operation]:
        """Returns an all-reduce of a copy in shared memory, unless its result would be copied anyway."""
        if whole.nbytes < MAPPED_BYTES_MIN:
            return {}
        shared = self._library.empty(len(whole), dtype=whole.dtype)
        client, total = self._library.mpi_ops.client(), self._library.Sum
        return {SHARED: Prepared(lambda: client.allreduce(shared, total), lambda: shared.copy_(whole))}

    def _plugged(self, whole: Any) -> dict[str, Operation]:
        """Returns all-reduces with codecs and reducers. Their names differ, because a codec keeps state by name."""
        client, total = self._library.mpi_ops.client(), self._library.Sum
        found: dict[str, Operation] = {}
        for one in self._extras.codecs:
            name = CODEC + one.text
            found[name] = functools.partial(client.allreduce, whole, total, name=name, codec=one.codec())
        for one in self._extras.reducers:
            name = REDUCER + one.text
            found[name] = functools.partial(client.allreduce, whole, one.reducer(), name=name)
        return found

    def close(self) -> None:
        """Shuts the session down."""
        self._library.shutdown()


class Gloo:
    """PyTorch's process group on Gloo: plain TCP."""

    def __init__(self, rank: int, ranks: int, rendezvous: str) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
        self._torch, self._group = torch, torch.distributed
        self.rank, self.ranks = rank, ranks
        self.versions = {"torch": str(torch.__version__)}

    def barrier(self) -> None:
        """Runs a barrier of the group."""
        self._group.barrier()

    def operations(self, collective: str, tensor: Array) -> dict[str, Operation]:
        """Returns variants on tensors that share the arrays' memory."""
        group = self._group
        share = len(tensor) // self.ranks
        whole = self._torch.from_numpy(tensor)
        out = numpy.empty(share if collective == "reduce_scatter" else len(tensor), numpy.float32)
        target, part = self._torch.from_numpy(out), whole[:share]
        return {
            "allreduce": {IN_PLACE: _giving(tensor, group.all_reduce, whole)},
            "broadcast": {IN_PLACE: _giving(tensor, group.broadcast, whole, ROOT_RANK)},
            "allgather": {INTO: _giving(out, group.all_gather_into_tensor, target, part)},
            "reduce_scatter": {INTO: _giving(out, group.reduce_scatter_tensor, target, whole)},
            "alltoall": {INTO: _giving(out, group.all_to_all_single, target, whole)},
        }[collective]

    def close(self) -> None:
        """Destroys the group."""
        self._group.destroy_process_group()


class OpenMpi:
    """Open MPI through mpi4py's buffer interface, which makes no copies."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self._world.Get_rank(), self._world.Get_size()
        library = MPI.Get_library_version().split(",")[0]
        self.versions = {"mpi": library.strip("\0 "), "mpi4py": importlib.metadata.version("mpi4py")}

    def barrier(self) -> None:
        """Runs a barrier of all ranks."""
        self._world.Barrier()

    def operations(self, collective: str, tensor: Array) -> dict[str, Operation]:
        """Returns variants, in place where MPI supports it."""
        world, mpi = self._world, self._mpi
        share = len(tensor) // self.ranks
        part = tensor[:share]
        out = numpy.empty(share if collective == "reduce_scatter" else len(tensor), numpy.float32)
        return {
            "allreduce": {IN_PLACE: _giving(tensor, world.Allreduce, mpi.IN_PLACE, tensor, mpi.SUM)},
            "broadcast": {IN_PLACE: _giving(tensor, world.Bcast, tensor, ROOT_RANK)},
            "allgather": {INTO: _giving(out, world.Allgather, part, out)},
            "reduce_scatter": {INTO: _giving(out, world.Reduce_scatter_block, tensor, out, mpi.SUM)},
            "alltoall": {INTO: _giving(out, world.Alltoall, tensor, out)},
        }[collective]

    def close(self) -> None:
        """Finalizes MPI."""
        self._mpi.Finalize()


def _giving(result: Array, call: Callable[..., Any], *arguments: Any) -> Operation:
    """Returns an operation by a call that writes its result into preallocated memory."""

    def operation() -> Array:
        call(*arguments)
        return result

    return operation
