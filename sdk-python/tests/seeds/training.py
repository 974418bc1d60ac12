import torch

import horovod.torch as hvd

hvd.init()

# One GPU for each process.
torch.cuda.set_device(hvd.local_rank())

# The reader's own data.
samples = ...

# Each rank reads its share of them.
share = torch.utils.data.distributed.DistributedSampler(samples, num_replicas=hvd.size(), rank=hvd.rank())
batches = torch.utils.data.DataLoader(samples, batch_size=..., sampler=share)

# The reader's own model.
model = ...
model.cuda()

optimizer = optim.SGD(model.parameters())

# Gradients become those of all ranks.
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

# Everybody starts where rank 0 does.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(20):
    for number, (data, target) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if number % args.log_interval == 0:
            print(f"epoch {epoch}, {number * len(data)} of {len(share)}: loss {loss.item()}")
