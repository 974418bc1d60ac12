"""Run by the workers of an elastic job with on_failure="continue": one is lost, and the others see no exception."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import numpy
import torch

import ronde
import ronde.torch as hvd

WORKER = int(os.environ["RONDE_WORKER"])
STEPS, LOST_AT = 12, 5
# The workers at the begin of a training.
EVERYBODY = list(range(int(sys.argv[3]) if len(sys.argv) > 3 else 3))


def die() -> None:
    """Ends this worker as a machine that is lost does."""
    os.kill(os.getpid(), signal.SIGKILL)


def operations(victim: int) -> None:
    """All kinds of operations are in flight when a worker is lost that has submitted none of them."""
    client = ronde.connect(on_failure="continue")
    seen: list[tuple[int, int]] = []
    client.on_membership(lambda: seen.append((client.rank, client.size)))
    client.barrier("begun")
    if victim == WORKER:
        die()
    mine = numpy.full(100_000, WORKER + 1.0, dtype=numpy.float32)
    small, bits = numpy.array([WORKER + 2], dtype=numpy.int64), numpy.array([1 << WORKER | 8], dtype=numpy.uint8)
    in_place = torch.full((70_000,), float(WORKER), dtype=torch.bfloat16)
    shared = client.empty(50_000, torch.float32)
    shared[:] = WORKER + 1
    operations = {
        "sum": client.allreduce_async(mine, ronde.Sum, "sum"),
        "average": client.allreduce_async(mine, ronde.Average),
        "min": client.allreduce_async(small, ronde.Min),
        "max": client.allreduce_async(small, ronde.Max),
        "product": client.allreduce_async(small, ronde.Product),
        "bits": client.allreduce_async(bits, ronde.BitOr),
        "scaled": client.allreduce_async(mine, ronde.Average, "scaled", 2.0, 3.0),
        "encoded": client.allreduce_async(mine, ronde.Sum, "encoded", codec="bfloat16"),
        "in_place": client.allreduce_async(in_place, ronde.Sum, out=in_place),
        "zero_copy": client.allreduce_async(shared, ronde.Sum, out=shared),
        "root": client.broadcast_async(mine, 1 if victim == 0 else 0, "root"),
        "group": client.grouped_allreduce_async([mine, mine * 2, torch.ones(3)], ronde.Sum),
        "barrier": client.barrier_async("together"),
    }
    mine[:] = -1  # the submissions have copied it
    survivors = [worker for worker in range(3) if worker != victim]
    total = sum(worker + 1.0 for worker in survivors)
    names = list(operations)
    found = {name: operations[name].wait() for name in (names if client.rank % 2 else reversed(names))}
    expected = {
        "sum": total,
        "average": total / 2,
        "min": min(survivors) + 2,
        "max": max(survivors) + 2,
        "product": (survivors[0] + 2) * (survivors[1] + 2),
        "bits": 8 | sum(1 << worker for worker in survivors),
        "scaled": 3 * total,
        "encoded": total,
        "in_place": float(sum(survivors)),
        "zero_copy": total,
        "root": survivors[0] + 1.0,
    }
    for name, value in expected.items():
        assert (numpy.asarray(found[name].float() if name == "in_place" else found[name]) == value).all(), (name, found)
    assert found["in_place"] is in_place
    assert found["zero_copy"] is shared
    assert [float(each[0]) for each in found["group"]] == [total, 2 * total, 2.0], found["group"]
    assert seen == [(survivors.index(WORKER), 2)] == [(client.rank, client.size)], seen
    assert client.allreduce(small, ronde.Sum, "after").tolist() == [sum(survivors) + 4]
    print(f"worker {WORKER}: all operations over {survivors}", flush=True)
    client.close()


def refused(kind: str, victim: int) -> None:
    """An all-gather fails, and so does every operation of a client with process sets.

    The victim dies when the others have submitted theirs.
    """
    client = ronde.connect(on_failure="continue")
    if kind == "sets":
        client.add_process_set([0, 2])
    client.barrier("begun")
    if victim == WORKER:
        for worker in EVERYBODY:
            if worker != victim:
                client.recv(worker)
        die()
    mine = numpy.ones(3)
    handle = client.allgather_async(mine) if kind == "gather" else client.allreduce_async(mine)
    # Not waited for: the victim may have received it, and be dead before this worker's sidecar knows.
    ready = client.send_async(numpy.ones(1, "int8"), victim)
    try:
        handle.wait()
    except ronde.PeerLostError as error:
        print(f"worker {WORKER}: {kind}: {error}", flush=True)
    del ready
    assert client.is_open == (kind == "gather")
    client.close()


class Model(torch.nn.Module):
    """Some layers, with gradients that all workers know: of worker w in step s, (w + 1) * (s + 1) times the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(40_000)) for _ in range(4)])

    def forward(self, step: int, worker: int) -> torch.Tensor:
        parts = [(each * ((worker + 1) * (step + 1) * (number + 1))).sum() for number, each in enumerate(self.layers)]
        return torch.stack(parts).sum()


def training(victim: int, **options: Any) -> None:
    """A training loses a worker amid the all-reduces of a step. The script sees no exception."""
    hvd.init(on_failure="continue")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    calls: list[int] = []
    resets: list[tuple[int, int]] = []
    state.register_reset_callbacks([lambda: resets.append((hvd.rank(), hvd.size()))])

    @hvd.elastic.run
    def train(state: Any) -> None:
        calls.append(state.step)
        while state.step < STEPS:
            optimizer.zero_grad()
            if victim == WORKER and state.step == LOST_AT:
                model.layers[1].register_hook(lambda gradient: die())
            model(state.step, WORKER).backward()
            optimizer.step()
            state.step += 1
            if state.step % 3 == 0:
                state.commit()

    train(state)
    assert calls == [0, 6], calls
    survivors = [worker for worker in EVERYBODY if worker != victim]
    assert resets == [(hvd.rank(), len(survivors))], resets
    assert survivors[hvd.rank()] == WORKER
    check_weights(model, survivors)
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    assert len(set(hvd.allgather_object(digest))) == 1
    print(f"worker {WORKER}: trained over {survivors}", flush=True)


def check_weights(model: Model, survivors: list[int]) -> None:
    """Compares with what one process computes that knows the gradients of all workers.

    The lost worker has not submitted all gradients of its last step, so none of them is part of an average.
    """
    for number, layer in enumerate(model.layers):
        expected = 0.0
        for step in range(STEPS):
            workers = EVERYBODY if step < LOST_AT else survivors
            gradients = [(worker + 1) * (step + 1) * (number + 1) for worker in workers]
            expected -= 2.0**-10 * sum(gradients) / len(workers)
        assert (layer == layer[0]).all()
        assert abs(layer[0].item() - expected) < 1e-5, (number, layer[0].item(), expected)


if __name__ == "__main__":
    mode, lost = sys.argv[1], int(sys.argv[2])
    if mode == "operations":
        operations(lost)
    elif mode in ("gather", "sets"):
        refused(mode, lost)
    else:
        training(lost, **({"groups": 1} if mode == "grouped" else {"gradient_predivide_factor": 2.0}))
