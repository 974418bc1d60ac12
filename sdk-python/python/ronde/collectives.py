"""The collectives of a client: what each takes and gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.ops import Average
from ronde.process_set import ProcessSet
from ronde.submission import (
    Submission,
    rank_number,
    read_any,
    read_nothing,
    read_tensor,
    reduction,
    share_of,
    splits_of,
    tag_number,
    target_of_rows,
)
from ronde.tensors import integers_like, source_of, target_like

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ronde import _ronde
    from ronde.handle import GroupHandle, Handle, MessageHandle
    from ronde.plugins import Plugin, PluginOp


class Collectives(Submission):
    """What all ranks, or those of a process set, do together. `Client` has these methods.

    Each has a form with `_async`, which returns a handle as soon as the tensor's bytes have been taken (it may be
    changed then, unless it lies in memory of `Client.empty`) and raises only what is wrong with the arguments,
    RefusedError with cause "limit", and why the session is over, if it is. What befalls the operation later is raised
    by `Handle.wait`.

    These arguments and rules are the same everywhere:

    tensor      -- a dense tensor of type uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64
                   or bool; the type is the same on all ranks
    name        -- what the ranks know the operation by; without one it gets a number in the order of calls
    process_set -- whose ranks take part; without one all ranks of the job. Rows and results are in the order of its
                   ranks; roots are always ranks of the job.

    Raises:
    ValueError     -- the argument is none of these, or cannot be, and the text says why; this worker is not in the
                      process set, or the set was removed; nothing was submitted
    MismatchError  -- the ranks do not ask for the same; on all ranks, and the job goes on
    RefusedError   -- it cannot be done, another rank gave it up, or (cause "limit") there is no room for it; the job
                      goes on
    TimedOutError  -- `operation_timeout` has passed
    PeerLostError  -- a worker or sidecar is lost: the epoch is over
    ShutDownError  -- another rank has left, or this client is closed
    RondeError     -- with another cause, such as "used_after_fork" in a forked child
    """

    def allreduce(
        self,
        tensor: Any,
        op: int | PluginOp = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        out: Any = None,
        codec: str | Plugin | None = None,
        process_set: ProcessSet | None = None,
    ) -> Any:
        """The reduction of all ranks' tensors, element by element, on every rank; of the input's type and shape.

        tensor -- its shape, and op, scales and codec, are the same on all ranks
        op     -- Average, Sum, Min, Max, Product; of floating-point types also Adasum, Median, ClippedMean; of integers
                  and bool also BitAnd, BitOr, BitXor. The average of integers is truncated toward zero. Of bool, Sum
                  and Max are `or`, Product and Min are `and`, and Average is refused. float16 and bfloat16 are added
                  in float32: ranks of one sidecar at once, then rounded at each addition between sidecars. Their
                  average does not overflow on the way; for float16 that holds on up to 32 sidecars, and a sum beyond
                  65,504 has 6 to 8 binary digits.
                  `ronde.PluginOp("median")` reduces as a plugin does, tensors of the types that the plugin takes.
        prescale_factor, postscale_factor -- multiply each rank's tensor before the reduction and the result after it;
                  finite and not 0. Integers are multiplied as float64 and truncated toward zero, saturating;
                  their average with a postscale is the sum times postscale / ranks, truncated once.
        out    -- a NumPy array or PyTorch tensor of the same type and shape, for the result; may be `tensor`. It is
                  written when the result is waited for. After an error its elements mean nothing. Without one a
                  large result stays in shared memory, and what is returned is a view of that: see `connect`.
        codec  -- "float16" or "bfloat16": how the elements are written on the way between sidecars, each rounded twice;
                  for the Sum and Average of float32
                  `ronde.Plugin("topk", ratio=0.01)` has a plugin encode them, for the Sum and Average of the types
                  that the plugin takes. The result is the same bits on all ranks, also of a lossy codec.

        Raises what is common; ValueError also for an `out` that does not fit, a scale that is 0 or not finite, an `op`
        that is no reduction and a codec that is not known, or that is a plugin next to an `op` that it does not go
        with; RefusedError also for what `op` and `codec` do not go with, for a plugin that the sidecar does not have or
        that takes neither these parameters nor this type, and for one that fails; MismatchError also when two sidecars
        have different plugins by one name.
        """
        handle = self.allreduce_async(
            tensor, op, name, prescale_factor, postscale_factor, out=out, codec=codec, process_set=process_set
        )
        return handle.wait()

    def allreduce_async(
        self,
        tensor: Any,
        op: int | PluginOp = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        out: Any = None,
        codec: str | Plugin | None = None,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """`allreduce` in flight."""
        source, options = source_of(tensor), reduction(op, prescale_factor, postscale_factor, codec)
        return self._submit("allreduce", source, name, process_set, out=target_like(out, source), **options)

    def grouped_allreduce(
        self,
        tensors: Sequence[Any],
        op: int | PluginOp = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        out: Sequence[Any] | None = None,
        codec: str | Plugin | None = None,
        process_set: ProcessSet | None = None,
    ) -> list[Any]:
        """`allreduce` of several tensors, none of which is reduced before all are there on all ranks.

        tensors -- as many on all ranks, each as for `allreduce`; results come in their order
        out     -- a place for each result, as for `allreduce`; may be `tensors`

        A tensor that fails does not keep the others from being reduced; its error is raised. Raises what `allreduce`
        does.
        """
        handle = self.grouped_allreduce_async(
            tensors, op, name, prescale_factor, postscale_factor, out=out, codec=codec, process_set=process_set
        )
        return handle.wait()

    def grouped_allreduce_async(
        self,
        tensors: Sequence[Any],
        op: int | PluginOp = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        out: Sequence[Any] | None = None,
        codec: str | Plugin | None = None,
        process_set: ProcessSet | None = None,
    ) -> GroupHandle:
        """`grouped_allreduce` in flight."""
        options = reduction(op, prescale_factor, postscale_factor, codec)
        return self._submit_group("allreduce", tensors, name, process_set, out=out, **options)

    def allgather(
        self, tensor: Any, name: str | None = None, *, out: Any = None, process_set: ProcessSet | None = None
    ) -> Any:
        """All ranks' tensors, one after the other along the first dimension, on every rank.

        The dimensions are the same on all ranks but for the first, the rows, which may differ and be 0. The result is
        of shape (sum of all ranks' rows, *rest).

        out -- as for `allreduce`, of the result's shape. That it has as many rows is known when all ranks' are: it is
               then that ValueError is raised, on this rank alone.

        Raises what is common; ValueError also for an `out` that does not fit and for a scalar, which has no rows.
        """
        return self.allgather_async(tensor, name, out=out, process_set=process_set).wait()

    def allgather_async(
        self, tensor: Any, name: str | None = None, *, out: Any = None, process_set: ProcessSet | None = None
    ) -> Handle:
        """`allgather` in flight."""
        source = source_of(tensor)
        return self._submit("allgather", source, name, process_set, out=target_of_rows(out, source, None))

    def grouped_allgather(
        self, tensors: Sequence[Any], name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> list[Any]:
        """`allgather` of several tensors, none of which is gathered before all are there on all ranks."""
        return self.grouped_allgather_async(tensors, name, process_set=process_set).wait()

    def grouped_allgather_async(
        self, tensors: Sequence[Any], name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> GroupHandle:
        """`grouped_allgather` in flight."""
        return self._submit_group("allgather", tensors, name, process_set)

    def broadcast(
        self,
        tensor: Any,
        root_rank: int,
        name: str | None = None,
        *,
        out: Any = None,
        process_set: ProcessSet | None = None,
    ) -> Any:
        """The tensor of rank `root_rank`, on every rank.

        root_rank -- a rank of the job, in the process set; the same on all ranks
        tensor    -- its shape is the same on all ranks
        out       -- as for `allreduce`

        Raises what is common; ValueError also for a root that is not in the set.
        """
        return self.broadcast_async(tensor, root_rank, name, out=out, process_set=process_set).wait()

    def broadcast_async(
        self,
        tensor: Any,
        root_rank: int,
        name: str | None = None,
        *,
        out: Any = None,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """`broadcast` in flight."""
        source, root = source_of(tensor), rank_number(root_rank)
        return self._submit("broadcast", source, name, process_set, out=target_like(out, source), root=root)

    def grouped_broadcast(
        self,
        tensors: Sequence[Any],
        root_rank: int,
        name: str | None = None,
        *,
        process_set: ProcessSet | None = None,
    ) -> list[Any]:
        """`broadcast` of several tensors, none of which is sent before all are there on all ranks."""
        return self.grouped_broadcast_async(tensors, root_rank, name, process_set=process_set).wait()

    def grouped_broadcast_async(
        self,
        tensors: Sequence[Any],
        root_rank: int,
        name: str | None = None,
        *,
        process_set: ProcessSet | None = None,
    ) -> GroupHandle:
        """`grouped_broadcast` in flight."""
        return self._submit_group("broadcast", tensors, name, process_set, root=rank_number(root_rank))

    def reduce_scatter(
        self,
        tensor: Any,
        op: int = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        out: Any = None,
        process_set: ProcessSet | None = None,
    ) -> Any:
        """This rank's rows of the reduction of all ranks' tensors.

        tensor -- with a first dimension, the rows, which are divided: of r rows over n ranks the first r % n ranks get
                  one more than r // n. Its shape, op and scales are the same on all ranks.
        op     -- Average, Sum, Min, Max, Product, BitAnd, BitOr or BitXor, as for `allreduce`
        out    -- as for `allreduce`, of the shape of this rank's rows

        Raises what is common; ValueError also for an `out` that does not fit and for a scalar, which has no rows.
        """
        handle = self.reduce_scatter_async(
            tensor, op, name, prescale_factor, postscale_factor, out=out, process_set=process_set
        )
        return handle.wait()

    def reduce_scatter_async(
        self,
        tensor: Any,
        op: int = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        out: Any = None,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """`reduce_scatter` in flight."""
        source, options = source_of(tensor), reduction(op, prescale_factor, postscale_factor)
        rows = share_of(source.shape[0], self._set(process_set)) if source.shape else None
        target = target_of_rows(out, source, rows)
        return self._submit("reducescatter", source, name, process_set, out=target, **options)

    def grouped_reduce_scatter(
        self,
        tensors: Sequence[Any],
        op: int = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        process_set: ProcessSet | None = None,
    ) -> list[Any]:
        """`reduce_scatter` of several tensors, none of which is reduced before all are there on all ranks."""
        handle = self.grouped_reduce_scatter_async(
            tensors, op, name, prescale_factor, postscale_factor, process_set=process_set
        )
        return handle.wait()

    def grouped_reduce_scatter_async(
        self,
        tensors: Sequence[Any],
        op: int = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        process_set: ProcessSet | None = None,
    ) -> GroupHandle:
        """`grouped_reduce_scatter` in flight."""
        options = reduction(op, prescale_factor, postscale_factor)
        return self._submit_group("reducescatter", tensors, name, process_set, **options)

    def alltoall(
        self,
        tensor: Any,
        splits: Any = None,
        name: str | None = None,
        *,
        out: Any = None,
        process_set: ProcessSet | None = None,
    ) -> Any:
        """The rows that all ranks have for this one, in the order of ranks.

        tensor -- with a first dimension, its rows; the others are the same on all ranks
        splits -- how many of the rows each rank gets, as integers in the order of ranks; may be 0, and add up to the
                  number of rows. Without it every rank gets as many, for which the rows must be divisible.
        out    -- as for `allgather`

        Returns the tensor, or (tensor, received_splits) if splits were given: how many rows came from each rank, as
        int32 of PyTorch for PyTorch, else of NumPy. Raises what is common; ValueError also for splits or an `out` that
        do not fit and for a scalar.
        """
        return self.alltoall_async(tensor, splits, name, out=out, process_set=process_set).wait()

    def alltoall_async(
        self,
        tensor: Any,
        splits: Any = None,
        name: str | None = None,
        *,
        out: Any = None,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """`alltoall` in flight."""
        source = source_of(tensor)
        target = target_of_rows(out, source, None)
        read_rows, returns_splits = read_tensor(source, target), splits is not None

        def read(operation: _ronde.Operation) -> Any:
            received = operation.splits()
            result = read_rows(operation)
            return (result, integers_like(result, received)) if returns_splits else result

        return self._submit("alltoall", source, name, process_set, out=target, read=read, **splits_of(splits))

    def reduce(
        self,
        tensor: Any,
        root_rank: int,
        op: int = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        process_set: ProcessSet | None = None,
    ) -> Any:
        """The reduction of all ranks' tensors on rank `root_rank`; None on the others.

        tensor, op, scales -- as for `reduce_scatter`, and a scalar may be
        root_rank          -- as for `broadcast`

        Raises what `broadcast` does.
        """
        handle = self.reduce_async(
            tensor, root_rank, op, name, prescale_factor, postscale_factor, process_set=process_set
        )
        return handle.wait()

    def reduce_async(
        self,
        tensor: Any,
        root_rank: int,
        op: int = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        process_set: ProcessSet | None = None,
    ) -> Handle:
        """`reduce` in flight."""
        root = rank_number(root_rank)
        source, options = source_of(tensor), reduction(op, prescale_factor, postscale_factor)
        read = self._for_root(root, source)
        return self._submit("reduce", source, name, process_set, read=read, root=root, **options)

    def gather(
        self, tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> Any:
        """What `allgather` gives, on rank `root_rank`; None on the others. Raises what both do."""
        return self.gather_async(tensor, root_rank, name, process_set=process_set).wait()

    def gather_async(
        self, tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> Handle:
        """`gather` in flight."""
        root = rank_number(root_rank)
        source = source_of(tensor)
        return self._submit("gather", source, name, process_set, read=self._for_root(root, source), root=root)

    def scatter(
        self, tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> Any:
        """This rank's rows of the tensor of rank `root_rank`, divided as by `reduce_scatter`.

        tensor    -- on the root; only its type and shape count. On other ranks a PyTorch tensor asks for the result as
                     one, and anything else, such as None, for NumPy's.
        root_rank -- as for `broadcast`

        Raises what `broadcast` does; ValueError also for a scalar, which has no rows.
        """
        return self.scatter_async(tensor, root_rank, name, process_set=process_set).wait()

    def scatter_async(
        self, tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> Handle:
        """`scatter` in flight."""
        root = rank_number(root_rank)
        if root == self._session.rank:
            return self._submit("scatter", tensor, name, process_set, root=root)
        return self._request("scatter", read_any(tensor), name, process_set, root=root)

    def send(self, tensor: Any, to_rank: int, tag: int = 0, *, process_set: ProcessSet | None = None) -> None:
        """Hands a tensor to one other rank, which calls `recv`; returns once that has taken it, or will.

        to_rank -- a rank of the job, in the process set, other than this one
        tag     -- tells messages between the same two ranks apart, 0 to 2^32 - 1; those with the same tag arrive in
                   order

        Other ranks take no part. Raises what is common; ValueError also for a rank that is not in the set or this one.
        """
        self.send_async(tensor, to_rank, tag, process_set=process_set).wait()

    def send_async(self, tensor: Any, to_rank: int, tag: int = 0, *, process_set: ProcessSet | None = None) -> Handle:
        """`send` in flight."""
        to, tag = rank_number(to_rank), tag_number(tag)
        return self._submit("send", tensor, None, process_set, read=read_nothing, root=to, tag=tag)

    def recv(
        self, from_rank: int | None, tag: int = 0, *, like: Any = None, process_set: ProcessSet | None = None
    ) -> Any:
        """The tensor that another rank sends with `send`, of the sender's type and shape.

        from_rank -- a rank of the job, in the process set, other than this one; None for any of them: the message is
                     the one that was announced first of those that no earlier receive takes
        tag       -- as for `send`
        like      -- a PyTorch tensor asks for the result as one on its device, anything else for NumPy's

        Receives with one tag take messages in the order of the calls, those from a given rank and those from any.
        Raises what `send` does.
        """
        return self.recv_async(from_rank, tag, like=like, process_set=process_set).wait()

    def recv_async(
        self, from_rank: int | None, tag: int = 0, *, like: Any = None, process_set: ProcessSet | None = None
    ) -> MessageHandle:
        """`recv` in flight; `MessageHandle.source` gives the rank that sent the message."""
        options: dict[str, Any] = {"tag": tag_number(tag)}
        options.update({"any_source": True} if from_rank is None else {"root": rank_number(from_rank)})
        return self._receive(like, process_set, **options)

    def barrier(self, name: str | None = None, *, process_set: ProcessSet | None = None) -> None:
        """Returns when every rank has called it with this name; without one, equally often.

        Does not wait for operations in flight. Raises what is common.
        """
        self.barrier_async(name, process_set=process_set).wait()

    def barrier_async(self, name: str | None = None, *, process_set: ProcessSet | None = None) -> Handle:
        """`barrier` in flight."""
        return self._request("barrier", read_nothing, name, process_set)

    def join(self) -> int:
        """Says that this rank has no more tensors; returns, when all ranks have said so, the one that was the last.

        Until then the other ranks' `allreduce` with Average, Sum or Adasum goes on with zeros for this one, by whose
        number an average is still divided, and `barrier` with this one counted as there; everything else on all ranks
        of the job is refused. Other process sets go on as ever. Raises what is common.
        """
        last: int = self.join_async().wait()
        return last

    def join_async(self) -> Handle:
        """`join` in flight. Until it is complete nothing else is submitted on all ranks of the job by this rank."""
        return self._request("join", lambda operation: operation.last_joined())

    def add_process_set(self, ranks: Iterable[int]) -> ProcessSet:
        """Forms a process set of some ranks of the job. All ranks of the job call it, with the same ranks.

        Raises what is common; ValueError also for what are no ranks; RefusedError also for a rank twice, one that the
        job does not have, and ranks that form a process set already.
        """
        members = [rank_number(rank) for rank in ranks]
        number = self._request("add_process_set", lambda operation: operation.set_id(), ranks=members).wait()
        added = ProcessSet(number, members, self._session.rank)
        self._sets[number] = added
        return added

    def remove_process_set(self, process_set: ProcessSet) -> bool:
        """Dissolves a process set, whose `id` becomes None. All ranks of the job call it.

        Operations of the set that some of its ranks have not submitted yet are refused. Returns False, and does
        nothing, for the set of all ranks and for one that is not there (any more). Raises what is common.
        """
        number = process_set.id
        if not number or self._sets.get(number) is not process_set:
            return False
        self._request("remove_process_set", read_nothing, removed=number).wait()
        del self._sets[number]
        process_set.id = None
        return True

    @property
    def global_process_set(self) -> ProcessSet:
        """The process set of all ranks of the job."""
        return self._sets[0]
