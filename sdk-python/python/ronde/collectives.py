"""The collectives of a client: their arguments and results."""

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
    """Operations that all ranks, or those of a process set, perform together. `Client` has these methods.

    Each has a form with `_async`, which copies the tensor's bytes and returns a handle. You may overwrite the tensor as
    soon as it returns, unless it is in memory from `Client.empty` or on a GPU (docs/GPU.md). This form raises only
    errors in the arguments, RefusedError with cause "limit", and the session's error if it is over. `Handle.wait`
    raises later errors of the operation.

    These arguments and rules apply to all of them:

    tensor      -- a dense tensor of type uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64
                   or bool; the type is the same on all ranks
    name        -- identifies the operation on all ranks; default: a number in call order
    process_set -- the ranks that take part; default: all ranks of the job. Rows and results are in the order of its
                   ranks; roots are always ranks of the job.

    Raises:
    ValueError     -- an argument is invalid, as the text explains; this worker is not in the process set, or the set
                      was removed; nothing was submitted
    MismatchError  -- the ranks submitted different requests; on all ranks, and the job continues
    RefusedError   -- the request is not possible, another rank gave the operation up, or (cause "limit") there is no
                      room for it; the job continues
    TimedOutError  -- `operation_timeout` has passed
    PeerLostError  -- a worker or sidecar is lost: the epoch is over
    ShutDownError  -- another rank has shut down, or this client is closed
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
        """Reduces all ranks' tensors element by element. Every rank gets the result, of the input's type and shape.

        tensor -- its shape, and op, scales and codec, are the same on all ranks
        op     -- Average, Sum, Min, Max, Product; for floating-point types also Adasum, Median, ClippedMean; for
                  integers and bool also BitAnd, BitOr, BitXor. The average of integers is truncated toward zero. For
                  bool, Sum and Max are `or`, Product and Min are `and`, and Average is rejected. float16 and bfloat16
                  are added in float32: all ranks of one sidecar first, then rounded at each addition between sidecars.
                  Their average does not overflow in between; for float16 that holds on up to 32 sidecars, and a sum
                  beyond 65,504 has 6 to 8 binary digits.
                  `ronde.PluginOp("median")` reduces with a plugin, for tensors of the types that the plugin accepts.
        prescale_factor, postscale_factor -- multiply each rank's tensor before the reduction and the result after it;
                  finite and not 0. Integers are multiplied as float64 and truncated toward zero, saturating;
                  their average with a postscale is the sum times postscale / ranks, truncated once.
        out    -- a NumPy array or PyTorch tensor of the same type and shape for the result; may be `tensor`. The wait
                  for the result writes it. After an error its contents are unspecified. Without `out`, a large result
                  stays in shared memory, and the returned tensor is a view of it (`mapped` of `connect`).
        codec  -- "float16" or "bfloat16": the encoding of elements between sidecars, which rounds each twice; for the
                  Sum and Average of float32.
                  `ronde.Plugin("topk", ratio=0.01)` encodes them with a plugin, for the Sum and Average of the types
                  that the plugin accepts. The result has the same bits on all ranks, even with a lossy codec.

        Raises the common errors. Also raises ValueError for an `out` that does not fit, a scale that is 0 or not
        finite, an invalid `op`, and an unknown codec or one that cannot be used with `op`; RefusedError for an `op`
        that excludes `codec`, for a plugin that the sidecar does not have, that does not accept these parameters or
        this type, or that fails; MismatchError if two sidecars have different plugins under one name.
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
        """Starts `allreduce`; returns its handle."""
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
        """`allreduce` of several tensors as a group: the reduction starts when all tensors are ready on all ranks.

        tensors -- the same number on all ranks, each as for `allreduce`; results are in their order
        out     -- a target for each result, as for `allreduce`; may be `tensors`

        If a tensor fails, the others are still reduced, and its error is raised. Raises what `allreduce` does.
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
        """Starts `grouped_allreduce`; returns its handle."""
        options = reduction(op, prescale_factor, postscale_factor, codec)
        return self._submit_group("allreduce", tensors, name, process_set, out=out, **options)

    def allgather(
        self, tensor: Any, name: str | None = None, *, out: Any = None, process_set: ProcessSet | None = None
    ) -> Any:
        """Concatenates all ranks' tensors along the first dimension, on every rank.

        All dimensions but the first are the same on all ranks. The first, the rows, may differ and be 0. The result is
        of shape (sum of all ranks' rows, *rest).

        out -- as for `allreduce`, of the result's shape. The number of rows is known only when all ranks have submitted
               theirs: a wrong one raises ValueError then, on this rank only.

        Raises the common errors, and also ValueError for an `out` that does not fit and for a scalar, which has no
        rows.
        """
        return self.allgather_async(tensor, name, out=out, process_set=process_set).wait()

    def allgather_async(
        self, tensor: Any, name: str | None = None, *, out: Any = None, process_set: ProcessSet | None = None
    ) -> Handle:
        """Starts `allgather`; returns its handle."""
        source = source_of(tensor)
        return self._submit("allgather", source, name, process_set, out=target_of_rows(out, source, None))

    def grouped_allgather(
        self, tensors: Sequence[Any], name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> list[Any]:
        """`allgather` of several tensors as a group: it starts when all tensors are ready on all ranks."""
        return self.grouped_allgather_async(tensors, name, process_set=process_set).wait()

    def grouped_allgather_async(
        self, tensors: Sequence[Any], name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> GroupHandle:
        """Starts `grouped_allgather`; returns its handle."""
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
        """Sends the tensor of rank `root_rank` to every rank.

        root_rank -- a rank of the job, in the process set; the same on all ranks
        tensor    -- its shape is the same on all ranks
        out       -- as for `allreduce`

        Raises the common errors, and also ValueError for a root that is not in the set.
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
        """Starts `broadcast`; returns its handle."""
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
        """`broadcast` of several tensors as a group: it starts when all tensors are ready on all ranks."""
        return self.grouped_broadcast_async(tensors, root_rank, name, process_set=process_set).wait()

    def grouped_broadcast_async(
        self,
        tensors: Sequence[Any],
        root_rank: int,
        name: str | None = None,
        *,
        process_set: ProcessSet | None = None,
    ) -> GroupHandle:
        """Starts `grouped_broadcast`; returns its handle."""
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
        """Reduces all ranks' tensors and returns this rank's rows of the result.

        tensor -- its first dimension, the rows, is divided: of r rows over n ranks, the first r % n ranks get one more
                  than r // n. Its shape, op and scales are the same on all ranks.
        op     -- Average, Sum, Min, Max, Product, BitAnd, BitOr or BitXor, as for `allreduce`
        out    -- as for `allreduce`, of the shape of this rank's rows

        Raises the common errors, and also ValueError for an `out` that does not fit and for a scalar, which has no
        rows.
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
        """Starts `reduce_scatter`; returns its handle."""
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
        """`reduce_scatter` of several tensors as a group: it starts when all tensors are ready on all ranks."""
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
        """Starts `grouped_reduce_scatter`; returns its handle."""
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
        """Sends rows to every rank and returns the rows received from all ranks, in the order of ranks.

        tensor -- its first dimension is the rows; the others are the same on all ranks
        splits -- how many of the rows each rank gets, as integers in the order of ranks; may be 0, and add up to the
                  number of rows. Without it every rank gets the same number, by which the rows must be divisible.
        out    -- as for `allgather`

        Returns the tensor, or (tensor, received_splits) if splits were given: the rows received from each rank, as
        int32 of PyTorch for PyTorch, else of NumPy. Raises the common errors, and also ValueError for splits or an
        `out` that do not fit and for a scalar.
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
        """Starts `alltoall`; returns its handle."""
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
        """Reduces all ranks' tensors. Returns the result on rank `root_rank`, and None on the others.

        tensor, op, scales -- as for `reduce_scatter`; scalars are allowed
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
        """Starts `reduce`; returns its handle."""
        root = rank_number(root_rank)
        source, options = source_of(tensor), reduction(op, prescale_factor, postscale_factor)
        read = self._for_root(root, source)
        return self._submit("reduce", source, name, process_set, read=read, root=root, **options)

    def gather(
        self, tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> Any:
        """Returns the result of `allgather` on rank `root_rank`, and None on the others. Raises what both raise."""
        return self.gather_async(tensor, root_rank, name, process_set=process_set).wait()

    def gather_async(
        self, tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> Handle:
        """Starts `gather`; returns its handle."""
        root = rank_number(root_rank)
        source = source_of(tensor)
        return self._submit("gather", source, name, process_set, read=self._for_root(root, source), root=root)

    def scatter(
        self, tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> Any:
        """Returns this rank's rows of the tensor of rank `root_rank`, divided as by `reduce_scatter`.

        tensor    -- on the root, the tensor to divide. On other ranks it only selects the result's library: a PyTorch
                     tensor selects PyTorch, and anything else, such as None, NumPy.
        root_rank -- as for `broadcast`

        Raises what `broadcast` does, and also ValueError for a scalar, which has no rows.
        """
        return self.scatter_async(tensor, root_rank, name, process_set=process_set).wait()

    def scatter_async(
        self, tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None
    ) -> Handle:
        """Starts `scatter`; returns its handle."""
        root = rank_number(root_rank)
        if root == self._session.rank:
            return self._submit("scatter", tensor, name, process_set, root=root)
        return self._request("scatter", read_any(tensor), name, process_set, root=root)

    def send(self, tensor: Any, to_rank: int, tag: int = 0, *, process_set: ProcessSet | None = None) -> None:
        """Sends a tensor to one other rank, which calls `recv`. Returns once it is or will be received.

        to_rank -- a rank of the job, in the process set, other than this one
        tag     -- distinguishes messages between the same two ranks, 0 to 2^32 - 1; those with the same tag arrive in
                   order

        Other ranks take no part. Raises the common errors, and also ValueError for this rank and for one that is not
        in the set.
        """
        self.send_async(tensor, to_rank, tag, process_set=process_set).wait()

    def send_async(self, tensor: Any, to_rank: int, tag: int = 0, *, process_set: ProcessSet | None = None) -> Handle:
        """Starts `send`; returns its handle."""
        to, tag = rank_number(to_rank), tag_number(tag)
        return self._submit("send", tensor, None, process_set, read=read_nothing, root=to, tag=tag)

    def recv(
        self, from_rank: int | None, tag: int = 0, *, like: Any = None, process_set: ProcessSet | None = None
    ) -> Any:
        """Receives the tensor that another rank sends with `send`, of the sender's type and shape.

        from_rank -- a rank of the job, in the process set, other than this one; None for any of them: it receives the
                     message that was announced first of those that no earlier receive matches
        tag       -- as for `send`
        like      -- a PyTorch tensor selects PyTorch, on its device, for the result; anything else NumPy

        Receives with one tag match messages in call order, those from a given rank and those from any rank alike.
        Raises what `send` does.
        """
        return self.recv_async(from_rank, tag, like=like, process_set=process_set).wait()

    def recv_async(
        self, from_rank: int | None, tag: int = 0, *, like: Any = None, process_set: ProcessSet | None = None
    ) -> MessageHandle:
        """Starts `recv`; `MessageHandle.source` gives the rank that sent the message."""
        options: dict[str, Any] = {"tag": tag_number(tag)}
        options.update({"any_source": True} if from_rank is None else {"root": rank_number(from_rank)})
        return self._receive(like, process_set, **options)

    def barrier(self, name: str | None = None, *, process_set: ProcessSet | None = None) -> None:
        """Waits until every rank has called it with this name, or, without a name, the same number of times.

        Does not wait for operations in flight. Raises the common errors.
        """
        self.barrier_async(name, process_set=process_set).wait()

    def barrier_async(self, name: str | None = None, *, process_set: ProcessSet | None = None) -> Handle:
        """Starts `barrier`; returns its handle."""
        return self._request("barrier", read_nothing, name, process_set)

    def join(self, *, process_set: ProcessSet | None = None) -> int:
        """Declares that this rank has no more tensors for a process set; default: that of all ranks of the job.

        Returns, once all ranks of the set have joined, the rank of the job that joined last.

        Until then `allreduce` with Average, Sum or Adasum on the other ranks of the set uses zeros for this rank, which
        still counts in the divisor of an average, and `barrier` does not wait for it. All other operations on the set
        are rejected, and so is its removal. Other process sets are not affected. Raises the common errors.
        """
        last: int = self.join_async(process_set=process_set).wait()
        return last

    def join_async(self, *, process_set: ProcessSet | None = None) -> Handle:
        """Starts `join`; returns its handle. Until it completes, this rank may submit nothing else on the set."""
        replay = self._replay if process_set is None or process_set.id == 0 else None

        def read(operation: _ronde.Operation) -> int:
            last = operation.last_joined()
            if replay is not None:
                replay.restart_counting()
            return last

        return self._request("join", read, None, process_set)

    def add_process_set(self, ranks: Iterable[int], *, members_only: bool = False) -> ProcessSet:
        """Creates a process set of some ranks of the job. All ranks of the job must call it, with the same ranks.

        members_only -- only these ranks call it, this rank among them, each with the same ranks; the others take no
                        part. If there is a set of exactly these ranks, it is the result.

        With `members_only`, the n-th call with some ranks matches the n-th call of each other one of them. The set
        lasts until the job ends or all ranks of the job remove it.

        Raises the common errors. Also raises ValueError for invalid ranks, and RefusedError for a duplicate rank, one
        that the job does not have, and, without `members_only`, ranks that already form a process set; with it also for
        a rank that is not among them.
        """
        added: ProcessSet = self.add_process_set_async(ranks, members_only=members_only).wait()
        return added

    def add_process_set_async(self, ranks: Iterable[int], *, members_only: bool = False) -> Handle:
        """Starts `add_process_set`; returns its handle.

        Several may be in flight at once; those of `members_only` in any order. Dropping the handle of a set that is not
        complete withdraws this rank's part, and it fails on the other ranks.
        """
        members = [rank_number(rank) for rank in ranks]
        # Not the client itself: the handle keeps it alive, and would be part of a cycle.
        sets, me = self._sets, self._session.rank

        def read(operation: _ronde.Operation) -> ProcessSet:
            number = operation.set_id()
            known = sets.get(number)
            if known is None or known.ranks != sorted(members):
                known = sets[number] = ProcessSet(number, members, me)
            return known

        # Absent unless it is wanted: all other requests stay what they were.
        options: dict[str, Any] = {"members_only": True} if members_only else {}
        return self._request("add_process_set", read, ranks=members, **options)

    def remove_process_set(self, process_set: ProcessSet | int) -> bool:
        """Removes a process set and sets its `id` to None. All ranks of the job must call it.

        process_set -- the set, or its number: a rank that is not in it knows only the number if the members have
                       made it with `members_only`

        Operations of the set that some of its ranks have not submitted yet fail with RefusedError. Returns False, and
        does nothing, for the set of all ranks and for one that does not exist (any more); a number that this rank does
        not know counts as one that exists. Raises the common errors.
        """
        if isinstance(process_set, int):
            known = self._sets.get(process_set)
            if known is None:
                self._request("remove_process_set", read_nothing, removed=rank_number(process_set)).wait()
                return True
            process_set = known
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"remove_process_set takes a ProcessSet or its number, not {process_set!r}")
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
