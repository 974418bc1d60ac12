"""Run by every rank: states that differ from that of rank 0, and one that cannot be sent."""

from __future__ import annotations

import sys

import torch

import ronde.torch as hvd


def failure(state: hvd.elastic.TorchState) -> str:
    """Returns the text of the error that synchronizing raises."""
    try:
        state.sync()
    except ValueError as error:
        return str(error)
    raise AssertionError(f"rank {hvd.rank()} has synchronized")


def main() -> None:
    """Checks the errors of all ranks, and that the session can be used afterwards."""
    hvd.init()
    last = hvd.size() - 1
    is_last = hvd.rank() == last
    model = torch.nn.Sequential(torch.nn.Linear(3, 4 if is_last else 2))
    text = failure(hvd.elastic.TorchState(model, epoch=0))
    expected = (
        f"rank {last}, differs from that of rank 0: model.0.weight is float32[4, 3] here and float32[2, 3] on rank 0"
    )
    assert (expected if is_last else f"the state of rank {last} differs") in text, text

    layers = [torch.nn.Linear(1, 1) for _ in range(2 if is_last else 1)]
    text = failure(hvd.elastic.TorchState(torch.nn.Sequential(*layers), **({"extra": 1} if is_last else {"step": 1})))
    if is_last:
        assert "rank 0 has the attribute step, this worker does not" in text, text
        assert "this worker has the attribute extra, rank 0 does not" in text, text
        assert "rank 0 has no model.1.weight" in text, text

    model = torch.nn.Linear(1, 1)
    groups = [{"params": [each]} for each in model.parameters()] if is_last else model.parameters()
    text = failure(hvd.elastic.TorchState(model, torch.optim.SGD(groups, lr=0.1)))
    assert not is_last or "optimizer.param_groups[0] is 1 parameters here and 2 parameters on rank 0" in text, text

    text = failure(hvd.elastic.TorchState(loader=iter(()) if is_last else (row for row in range(3))))
    assert "the attribute loader of the state cannot be sent" in text, text

    state = hvd.elastic.TorchState(torch.nn.Linear(2, 2), step=5 if hvd.rank() == 0 else 0)
    state.sync()
    assert state.step == 5
    assert hvd.max_size() == hvd.size()
    print(f"rank {hvd.rank()}: states are compared", flush=True)


if __name__ == "__main__":
    sys.exit(main())
