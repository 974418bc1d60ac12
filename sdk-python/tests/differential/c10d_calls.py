"""The calls of `torch.distributed` that programs consist of. They execute a step literally."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from differential.tensors import make, packed

Spec = dict[str, Any]


class Step:
    """One step of a program on this rank.

    fields -- the program's fields for this rank
    key    -- program and step, for the elements of tensors
    group  -- the process group; `ranks` are its members
    """

    def __init__(
        self, fields: dict[str, Any], key: tuple[object, ...], rank: int, group: Any, ranks: list[int]
    ) -> None:
        self.fields, self.key, self.rank, self.group, self.ranks = fields, key, rank, group, ranks
        # Tensors whose elements are compared, by name. Views are watched with the memory around them.
        self.watched: dict[str, torch.Tensor] = {}
        # Other results: objects, numbers, tensors that a call has made.
        self.found: dict[str, Any] = {}

    @property
    def is_async(self) -> bool:
        """Whether the call is to return a Work."""
        return self.fields.get("mode", "sync") != "sync"

    @property
    def is_never(self) -> bool:
        """Whether no thread waits for the Work."""
        return bool(self.fields.get("mode") == "never")

    @property
    def op(self) -> Any:
        """The reduction."""
        return getattr(dist.ReduceOp, self.fields.get("op", "SUM"))

    @property
    def root(self) -> int:
        """Source or destination, as a rank of the job."""
        root: int = self.fields["root"]
        return root

    def one(self, name: str = "tensor") -> torch.Tensor:
        """A tensor of the step."""
        return self._make(name, self.fields[name])

    def many(self, name: str = "tensors") -> list[torch.Tensor]:
        """A list of tensors of the step."""
        return [self._make(f"{name}.{index}", spec) for index, spec in enumerate(self.fields[name])]

    def _make(self, name: str, spec: Spec | None) -> Any:
        if spec is None:
            return None
        tensor, base = make(spec, *self.key, name, self.rank)
        self.watched[name] = base
        return tensor

    def options(self) -> dict[str, Any]:
        """Arguments that all collectives take."""
        return {"group": self.group, "async_op": self.is_async}


def all_reduce(step: Step) -> Any:
    return dist.all_reduce(step.one(), step.op, **step.options())


def sparse_all_reduce(step: Step) -> Any:
    dense = step.one()
    sparse = (dense * (dense > 0)).to_sparse()
    work = dist.all_reduce(sparse, step.op, **step.options())
    step.watched["sparse"] = sparse
    return work


def all_reduce_coalesced(step: Step) -> Any:
    return dist.all_reduce_coalesced(step.many(), step.op, **step.options())


def broadcast(step: Step) -> Any:
    return dist.broadcast(step.one(), step.root, **step.options())


def reduce(step: Step) -> Any:
    return dist.reduce(step.one(), step.root, step.op, **step.options())


def all_gather(step: Step) -> Any:
    return dist.all_gather(step.many("outputs"), step.one(), **step.options())


def all_gather_into_tensor(step: Step) -> Any:
    return dist.all_gather_into_tensor(step.one("output"), step.one(), **step.options())


def all_gather_coalesced(step: Step) -> Any:
    flat, count = step.many("outputs"), len(step.fields["tensors"])
    lists = [flat[start : start + count] for start in range(0, len(flat), count)]
    return dist.all_gather_coalesced(lists, step.many(), **step.options())


def gather(step: Step) -> Any:
    outputs = None if step.fields["outputs"] is None else step.many("outputs")
    return dist.gather(step.one(), outputs, step.root, **step.options())


def scatter(step: Step) -> Any:
    inputs = None if step.fields["tensors"] is None else step.many()
    return dist.scatter(step.one("output"), inputs, step.root, **step.options())


def reduce_scatter(step: Step) -> Any:
    return dist.reduce_scatter(step.one("output"), step.many(), step.op, **step.options())


def reduce_scatter_tensor(step: Step) -> Any:
    return dist.reduce_scatter_tensor(step.one("output"), step.one(), step.op, **step.options())


def all_to_all(step: Step) -> Any:
    return dist.all_to_all(step.many("outputs"), step.many(), **step.options())


def all_to_all_single(step: Step) -> Any:
    splits = step.fields.get("output_splits"), step.fields.get("input_splits")
    return dist.all_to_all_single(step.one("output"), step.one(), *splits, **step.options())


def barrier(step: Step) -> Any:
    return dist.barrier(**step.options())


def monitored_barrier(step: Step) -> Any:
    return dist.monitored_barrier(step.group)


def objects(step: Step) -> Any:
    """Collectives on objects, which are synchronous."""
    mine: Any = {"rank": step.rank, "text": "x" * step.fields["length"], "tensor": packed(step.one())}
    size, is_root, form = len(step.ranks), step.rank == step.root, step.fields["form"]
    slots: list[Any] = [None] * size
    if form == "all_gather":
        dist.all_gather_object(slots, mine, group=step.group)
    elif form == "gather":
        dist.gather_object(mine, slots if is_root else None, step.root, group=step.group)
    elif form == "broadcast":
        slots = [mine, step.rank] if is_root else [None, None]
        dist.broadcast_object_list(slots, step.root, group=step.group)
    else:
        slots = [None]
        dist.scatter_object_list(slots, [(mine, n) for n in range(size)] if is_root else None, step.root, step.group)
    step.found["objects"] = slots


def messages(step: Step) -> Any:
    """Sends and receives of this rank, in the order of the step: one by one, in flight, or as a batch."""
    form = step.fields["form"]
    mine = [(n, m) for n, m in enumerate(step.fields["messages"]) if step.rank in (m["src"], m["dst"])]
    batch: list[Any] = []
    works: list[Any] = []
    for number, message in mine:
        is_sender = step.rank == message["src"]
        tensor, base = make(message["tensor"], *step.key, number, step.rank)
        step.watched[f"message.{number}"] = base
        peer = message["dst"] if is_sender else message["src"]
        if form == "batch":
            call = dist.isend if is_sender else dist.irecv
            batch.append(dist.P2POp(call, tensor, peer, step.group, message["tag"]))
        elif form == "flight":
            call = dist.isend if is_sender else dist.irecv
            works.append(call(tensor, peer, group=step.group, tag=message["tag"]))
        elif is_sender:
            dist.send(tensor, peer, group=step.group, tag=message["tag"])
        else:
            source = None if message.get("any") else peer
            step.found[f"source.{number}"] = dist.recv(tensor, source, group=step.group, tag=message["tag"])
    if batch:
        works += dist.batch_isend_irecv(batch)
    for work in works if step.fields["order"] == "fifo" else reversed(works):
        work.wait()


def functional_call(step: Step) -> Any:
    """`torch.distributed._functional_collectives`, which return new tensors."""
    form = step.fields["form"]
    group: Any = step.group if step.group is not None else dist.group.WORLD
    tensor = step.one()
    op = step.fields.get("op", "SUM").lower()
    if form == "all_reduce":
        result = functional.all_reduce(tensor, op, group)
    elif form == "all_reduce_coalesced":
        results = functional.all_reduce_coalesced([tensor, tensor + tensor], op, group)
        result = torch.stack([functional.wait_tensor(each) for each in results])
    elif form == "all_gather_tensor":
        result = functional.all_gather_tensor(tensor, step.fields["dim"], group)
    elif form == "reduce_scatter_tensor":
        result = functional.reduce_scatter_tensor(tensor, op, step.fields["dim"], group)
    elif form == "broadcast":
        result = functional.broadcast(tensor, step.root, group)
    else:
        splits = step.fields.get("output_splits"), step.fields.get("input_splits")
        result = functional.all_to_all_single(tensor, *splits, group)
    step.found["result"] = packed(functional.wait_tensor(result))


def differentiable_call(step: Step) -> Any:
    """`torch.distributed.nn.functional` and its gradients."""
    form, options = step.fields["form"], {"group": step.group if step.group is not None else dist.group.WORLD}
    inputs = [step.one()] if "tensor" in step.fields else step.many()
    given = [each * each for each in inputs]
    name = {"all_gather_base": "_all_gather_base"}.get(form, form)
    call = getattr(differentiable, name)
    if form in ("all_reduce", "all_gather"):
        result = call(given[0], **options)
    elif form in ("broadcast", "reduce", "gather"):
        result = call(given[0], step.root, **options)
    elif form == "scatter":
        result = call(given, step.root, **options)
    elif form == "reduce_scatter":
        result = call(step.one("output"), given, **options)
    elif form == "all_to_all":
        result = call(step.many("outputs"), given, **options)
    elif form == "all_gather_base":
        result = call(step.one("output"), given[0], **options)
    else:
        splits = step.fields.get("output_splits"), step.fields.get("input_splits")
        result = call(step.one("output"), given[0], *splits, **options)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    loss = torch.stack([(each.sin() * (step.rank + 1)).sum() for each in results]).sum()
    loss.backward()
    if form != "reduce" or step.rank == step.root:  # on other ranks elements are unspecified
        step.found["results"] = [packed(each) for each in results]
    step.found["gradients"] = [None if each.grad is None else packed(each.grad) for each in inputs]


CALLS: dict[str, Callable[[Step], Any]] = {
    call.__name__: call
    for call in (
        all_reduce,
        sparse_all_reduce,
        all_reduce_coalesced,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        all_gather_coalesced,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        barrier,
        monitored_barrier,
        objects,
        messages,
        functional_call,
        differentiable_call,
    )
}
