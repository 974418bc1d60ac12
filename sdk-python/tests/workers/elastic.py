"""Run by every rank: a training that fails, restores its last commit and continues; with "lost", a rank that dies."""

from __future__ import annotations

import os
import sys

import torch

import ronde.torch as hvd

STEPS, FAILS_AT = 6, 4


def main() -> None:
    """The training, and what it must have come to."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(24))
    # Other ranks' numbers do not count: those of rank 0 are everybody's.
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0 if hvd.rank() == 0 else 99)
    resets: list[int] = []
    steps: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, scale: float) -> str:
        while state.step < STEPS:
            steps.append(state.step)
            optimizer.zero_grad()
            (model(torch.full((2, 3), scale * (hvd.rank() + 1))) ** 2).mean().backward()
            optimizer.step()
            sampler.record_batch(state.step, 1)
            state.step += 1
            if len(steps) == FAILS_AT:
                # With one rank nothing can differ; a failed collective raises the same.
                if hvd.size() == 1:
                    raise hvd.HorovodInternalError("a collective failed")
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="differs")
            if len(sys.argv) > 1 and hvd.rank() == 1:
                os._exit(5)
            if state.step % 2 == 0:
                state.commit()
        return "done"

    assert train(state, 0.1) == "done"
    # The fourth step failed after the commit of the second one.
    assert steps == [0, 1, 2, 3, 2, 3, 4, 5], steps
    assert resets == [hvd.size()], resets
    assert state.commits == 3
    assert sampler.processed_num == STEPS * hvd.size()
    everybodys = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
    assert all(each == everybodys[0] for each in everybodys)
    print(f"rank {hvd.rank()}: restored and continued", flush=True)


if __name__ == "__main__":
    main()
