"""Run by every rank: optimizer states that are broadcast, for every optimizer of PyTorch."""

from __future__ import annotations

import collections
import sys
from typing import Any, Callable

import numpy
import torch
from torch import nn

import ronde.torch as hvd

Make = Callable[[Any], torch.optim.Optimizer]
ROOT_STEPS, STEPS = 3, 3
# Options under which a state differs from that of a step without gradients.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}],
    "ASGD": [{"lr": 0.1, "t0": 1, "lambd": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"lr": torch.tensor(0.01), "capturable": False}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Rprop": [{"lr": 100.0}],
}


def optimizers() -> list[tuple[str, Make]]:
    """Every optimizer of PyTorch that can be broadcast, some with several options."""
    made: list[tuple[str, Make]] = []
    for name in sorted(dir(torch.optim)):
        kind = getattr(torch.optim, name)
        is_one = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if not is_one or kind in (torch.optim.Optimizer, torch.optim.LBFGS):
            continue
        for options in OPTIONS.get(name, [{}]):
            made.append((f"{name} {options}", lambda p, kind=kind, options=options: kind(p, **options)))
    return made


def model_of(what: str) -> nn.Module:
    """One whose gradients are of the kind that the optimizer takes."""
    torch.manual_seed(2)
    if what.startswith("SparseAdam"):
        return nn.Embedding(5, 3, sparse=True)
    return nn.Linear(4, 3, bias=not what.startswith("Muon"))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int) -> None:
    """The same steps on all ranks."""
    for step in range(start, start + steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        if isinstance(model, nn.Embedding):
            loss = model(torch.tensor([step % 5, 1, (step + 2) % 5])).square().sum()
        else:
            loss = model(torch.randn(6, 4, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()


def check_states_of_every_optimizer() -> None:
    """After the broadcast all ranks go on as one process does that has the root's optimizer."""
    size, rank = hvd.size(), hvd.rank()
    for what, make in optimizers():
        # Steps that the root, and the others, have made before.
        for root_steps, others_steps in ((0, 0), (ROOT_STEPS, 0), (0, ROOT_STEPS), (ROOT_STEPS, 1)):
            for is_wrapped in (False, True):
                alone, together = model_of(what), model_of(what)
                single, mine = make(alone.parameters()), make(together.parameters())
                train(alone, single, root_steps, 0)
                train(together, mine, root_steps if rank == size - 1 else others_steps, 0)
                if is_wrapped:
                    mine = hvd.DistributedOptimizer(mine, named_parameters=together.named_parameters())
                hvd.broadcast_parameters(together.state_dict(), root_rank=size - 1)
                hvd.broadcast_optimizer_state(mine, root_rank=size - 1, model=together)
                train(together, mine, STEPS, root_steps)
                train(alone, single, STEPS, root_steps)
                for ours, theirs in zip(together.parameters(), alone.parameters()):
                    torch.testing.assert_close(
                        ours, theirs, msg=f"{what}, the root after {root_steps} steps, others {others_steps}"
                    )


def check_gradients_that_are_made() -> None:
    """Where there was no state, gradients that are missing are zeros, of the kind that the optimizer takes."""
    linear = nn.Linear(2, 2)
    linear.bias.requires_grad_(False)
    kept = torch.full((2, 2), 3.0)
    optimizer = torch.optim.Adam(linear.parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert linear.weight.grad is not None
    assert not linear.weight.grad.any()
    assert linear.bias.grad is None
    assert not optimizer.state, "no step was made"
    linear.weight.grad = kept
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert linear.weight.grad is kept
    assert kept.eq(3.0).all()
    table = nn.Embedding(3, 2)
    hvd.broadcast_optimizer_state(torch.optim.SparseAdam(table.parameters()), root_rank=0)
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse


def check_made_gradients_count_as_none() -> None:
    """A parameter that no rank uses stays where it is after a broadcast, however gradients are zeroed."""
    for zero in (
        lambda optimizer: optimizer.zero_grad(set_to_none=False),
        lambda optimizer: optimizer.zero_grad(),
        lambda optimizer: None,
    ):
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW([used, unused], weight_decay=0.5), named_parameters=zip("ab", (used, unused))
        )
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for _ in range(5):
            zero(optimizer)
            used.sum().backward()
            optimizer.step()
        assert unused.grad is None
        torch.testing.assert_close(unused.detach(), torch.ones(2))
        assert unused not in optimizer.state
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([unused], lr=1.0), named_parameters=[("a", unused)])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    unused.grad.add_(float(hvd.rank()))
    optimizer.step()
    torch.testing.assert_close(unused.detach(), torch.full((2,), 1.0 - (hvd.size() - 1) / 2))


def sparse_of(number: int) -> torch.Tensor:
    """Not coalesced, with as many rows as the number says, some of them twice, and a dense dimension."""
    rows = torch.arange(number + 2) % (number + 1)
    values = torch.arange(2.0 * len(rows)).reshape(-1, 2) + number
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, (number + 1, 2))


class Odd(torch.optim.SGD):
    """Options and states of all kinds."""

    def fill(self, number: int) -> None:
        """Depends on the rank."""
        group = self.param_groups[0]
        group["scalar"] = numpy.float32(number + 0.1)
        group["whole"] = numpy.int64(number)
        group["flag"] = numpy.bool_(number % 2)
        group["dtype"] = (torch.float16, torch.float64)[number % 2]
        group["numpy_dtype"] = numpy.dtype(("int8", "<f4")[number % 2])
        group["nested"] = {"deep": {"list": [number, (number, None, "text")], 3: torch.full((2,), float(number))}}
        group["array"] = numpy.full((2, 3), number, dtype=numpy.int16)
        group["complex"] = complex(number, -number)
        group["extremes"] = [float("inf"), float("-inf"), 1e-320, 2**70 + number]
        group["device"] = torch.device("cpu")
        group["sparse"] = sparse_of(number)
        group["nothing"] = torch.sparse_coo_tensor(size=(3, 0, 2))
        if number % 2:
            group["only of odd ranks"] = torch.zeros(2)
        parameter = group["params"][0]
        self.state[parameter] = {
            "inner": {"factors": [torch.full((3,), float(number)), torch.full((number + 1,), 2.0)]},
            "count": number,
            "half": torch.full((), float(number), dtype=torch.bfloat16),
        }
        self.state["all"] = {"step": number, "sum": torch.full((1,), float(number), dtype=torch.float64)}


def check_values_of_all_kinds() -> None:
    """Each arrives with its type."""
    size, rank = hvd.size(), hvd.rank()
    for root in range(min(size, 2)):
        optimizer = Odd([nn.Parameter(torch.ones(2))], lr=0.1)
        optimizer.fill(rank)
        expected = Odd([nn.Parameter(torch.ones(2))], lr=0.1)
        expected.fill(root)
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        ours, theirs = optimizer.param_groups[0], expected.param_groups[0]
        for key in theirs:
            if key != "params":
                alike(ours[key], theirs[key], key)
        mine, wanted = optimizer.state[ours["params"][0]], expected.state[theirs["params"][0]]
        alike(mine, wanted, "state")
        alike(optimizer.state["all"], expected.state["all"], "all")


def alike(ours: Any, theirs: Any, key: str) -> None:
    """The same value of the same type."""
    assert type(ours) is type(theirs), (key, ours, theirs)
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), (key, ours, theirs)
        for each in theirs:
            alike(ours[each], theirs[each], f"{key}.{each}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), key
        for index, (one, other) in enumerate(zip(ours, theirs)):
            alike(one, other, f"{key}.{index}")
    elif isinstance(theirs, torch.Tensor) and theirs.is_sparse:
        alike(ours.coalesce().indices(), theirs.coalesce().indices(), f"{key}.indices")
        alike(ours.coalesce().values(), theirs.coalesce().values(), f"{key}.values")
        assert (ours.shape, ours.sparse_dim()) == (theirs.shape, theirs.sparse_dim()), key
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, msg=key)
    elif isinstance(theirs, numpy.ndarray):
        numpy.testing.assert_array_equal(ours, theirs, key)
        assert ours.dtype == theirs.dtype
    else:
        assert ours == theirs, (key, ours, theirs)


def check_rejected_calls() -> None:
    """Unsupported values, optimizers that differ, and LBFGS raise on all ranks at once."""
    size, rank = hvd.size(), hvd.rank()
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for bad in (print, torch.ones(2, 2).to_sparse_csr(), torch.ones(1, dtype=torch.complex64), {(1,): 2}, {1, 2}):
        optimizer = torch.optim.SGD(weights, lr=0.1)
        if rank == 0:
            optimizer.param_groups[0]["bad"] = bad
        refused("cannot broadcast", optimizer)
    refused("LBFGS", torch.optim.LBFGS(weights))
    Pair = collections.namedtuple("Pair", "a b")
    optimizer = torch.optim.SGD(weights, lr=0.1)
    optimizer.param_groups[0]["pair"] = Pair(rank, 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["pair"] == Pair(0, 1)
    if size == 1:
        return
    is_other = rank == size - 1
    refused("has 2 parameters, this one 1", torch.optim.SGD(weights[: 2 - is_other], lr=0.1))
    shapes = [nn.Parameter(torch.ones(2 + is_other))]
    refused(f"rank {size - 1}: parameter 0 of group 0 is of shape [2] on the root", torch.optim.SGD(shapes, lr=0.1))
    groups = [{"params": [weight]} for weight in weights] if is_other else [{"params": weights}]
    refused("has 1 parameter groups, this one 2", torch.optim.SGD(groups, lr=0.1))


def refused(text: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError with this text."""
    try:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised that contains {text}")


def main() -> None:
    """Everything."""
    torch.set_num_threads(1)
    hvd.init()
    checks = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
    for check in checks:
        check()
        hvd.barrier()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(checks)} checks of states hold")
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
