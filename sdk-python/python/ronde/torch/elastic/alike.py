"""Checks that the states of all ranks have the same attributes and parameters, before rank 0's is broadcast.

A rank that runs another program or another version of it would wait for tensors that no other rank sends.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from ronde.elastic.membership import is_elastic
from ronde.frameworks import basics, process_sets
from ronde.torch import mpi_ops
from ronde.torch.objects import broadcast_bytes

# The differences that an error lists.
_LISTED_MAX = 5


def check(objects: dict[str, Any], names: list[str]) -> None:
    """Raises ValueError if this rank's state differs from rank 0's; in a job that is not elastic, if any rank's does.

    objects -- the models, optimizers and samplers of the state, by attribute
    names   -- its other attributes

    In an elastic job the other ranks continue: they lose this rank when its program ends.
    """
    if not basics.is_initialized() or mpi_ops.size() == 1:
        return  # without a session, the broadcasts that follow raise the error
    mine = _description(objects, names)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    members = process_sets.members_of(process_sets.global_process_set)
    digests = process_sets.exchanged(basics.client(), digest, "elastic.state", members)
    if len(set(digests)) == 1:
        return
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    is_root = mpi_ops.rank() == 0
    received = broadcast_bytes(text if is_root else None, 0, "ronde.elastic.description")
    differing = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if mpi_ops.rank() in differing:
        expected = json.loads(bytes(received.tolist()).decode())
        raise ValueError(
            f"the state of this worker, rank {mpi_ops.rank()}, differs from that of rank 0: "
            f"{difference(mine, expected)}. All workers of a job must run the same program with the same model: "
            "install the same version on this host, and start the worker again"
        )
    if not is_elastic():
        ranks = ", ".join(map(str, differing))
        raise ValueError(f"the state of rank {ranks} differs from that of rank 0; the error of that rank says how")


def difference(mine: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> str:
    """Returns how a description differs from rank 0's, in words."""
    found = [f"rank 0 has the attribute {name}, this worker does not" for name in expected if name not in mine]
    found += [f"this worker has the attribute {name}, rank 0 does not" for name in mine if name not in expected]
    for name, here in mine.items():
        there = expected.get(name, here)
        found += [f"{name}.{part} of rank 0 is missing here" for part in there if part not in here]
        found += [f"rank 0 has no {name}.{part}" for part in here if part not in there]
        found += [
            f"{name}.{part} is {here[part]} here and {there[part]} on rank 0"
            for part in here
            if part in there and here[part] != there[part]
        ]
    more = f", and {len(found) - _LISTED_MAX} more" if len(found) > _LISTED_MAX else ""
    return "; ".join(found[:_LISTED_MAX]) + more


def _description(objects: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, value in objects.items():
        found[name] = _parts(value)
    return found


def _parts(value: Any) -> dict[str, str]:
    """Describes the parts of an object that must be the same on all ranks."""
    if isinstance(value, torch.nn.Module):
        tensors = {name: each for name, each in value.state_dict().items() if isinstance(each, torch.Tensor)}
        return {name: f"{str(each.dtype).partition('.')[2]}{list(each.shape)}" for name, each in tensors.items()}
    if isinstance(value, torch.optim.Optimizer):
        groups = enumerate(value.param_groups)
        return {f"param_groups[{number}]": f"{len(group['params'])} parameters" for number, group in groups}
    return {}
