"""Run by both ranks: PyTorch's tensors in shared memory."""

from __future__ import annotations

import torch

import ronde.torch as hvd

hvd.init()
client, rank = hvd.client(), hvd.rank()
assert hvd.empty(2, 3).dtype == torch.float32
assert hvd.empty((2, 3)).shape == hvd.empty(torch.Size((2, 3))).shape == (2, 3)
assert hvd.empty().shape == ()
assert hvd.empty(0, 4).shape == (0, 4)
for wrong in (lambda: hvd.empty(3, dtype=torch.complex64), lambda: hvd.empty(3, -1)):
    try:
        wrong()
    except ValueError:
        continue
    raise AssertionError("a tensor that cannot be")

for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8):
    tensor = hvd.empty(50_000, 2, dtype=dtype).fill_(rank + 1)
    assert client.shared_memory.slots == 1
    handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="sum")
    assert client.shared_memory.slots == 2, "its result, and no copy"
    total = hvd.synchronize(handle)
    assert total.dtype == dtype
    assert (total == 3).all()
    del total
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    assert (tensor == 3).all()

# Differentiable as any; the gradient of a sum is a sum.
weights = hvd.empty(3).fill_(2.0).requires_grad_()
hvd.allreduce(weights * (rank + 1), op=hvd.Sum).sum().backward()
assert weights.grad is not None
assert weights.grad.tolist() == [2.0 * (rank + 1)] * 3
rows = hvd.empty(2, 4).fill_(rank)
assert hvd.allgather(rows[:1]).tolist() == [[0.0] * 4, [1.0] * 4]
hvd.shutdown()
assert rows.tolist() == [[float(rank)] * 4] * 2
print("nothing is copied")
