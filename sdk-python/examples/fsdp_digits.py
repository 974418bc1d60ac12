"""FSDP2 and tensor parallelism on handwritten digits, as torchtitan combines them; the backend's name is ronde.

ronde run -np 4 python fsdp_digits.py              FSDP2 over 2 pairs of ranks, tensor parallel within each
ronde run -np 2 python fsdp_digits.py --tensor 1   FSDP2 alone
python fsdp_digits.py                              one process, on the same global batches
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from digits import GLOBAL_BATCH, Digits, dataset, report, whole_batches
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 4


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share each linear layer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = dataset(seed=0)
    data = whole_batches(*train)
    torch.manual_seed(0)
    model = Digits()
    is_alone = "RANK" not in os.environ
    mesh = None
    if not is_alone:
        dist.init_process_group("ronde")
        sizes = (dist.get_world_size() // options.tensor, options.tensor)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parallelize(model, mesh)
    shards, shard = (1, 0) if mesh is None else (mesh["data"].size(), mesh["data"].get_local_rank())
    sampler: DistributedSampler[int] = DistributedSampler(data, shards, shard, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for images, labels in DataLoader(data, batch_size=GLOBAL_BATCH // shards, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    rank, size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    report(weights, test, rank, size)
    if not is_alone:
        dist.destroy_process_group()


def parallelize(model: Digits, mesh: DeviceMesh) -> None:
    """Shards the linear layers over one dimension of the mesh, and all parameters over the other."""
    if mesh["tensor"].size() > 1:
        parallelize_module(model.classes, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model.classes, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])


if __name__ == "__main__":
    main()
