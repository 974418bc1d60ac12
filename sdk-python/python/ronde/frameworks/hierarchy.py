"""Hierarchical Adasum, as in Horovod on GPUs: first the mean of each host's ranks, then Adasum across the hosts.

RONDE_HIERARCHICAL_ADASUM=1 on all ranks enables it in `ronde.torch`. A host here is the set of ranks of one sidecar. It
combines fewer vectors and sends fewer bytes.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ronde.ops import Adasum, Average

if TYPE_CHECKING:
    import torch

    from ronde.client import Client
    from ronde.frameworks.world import InFlight
    from ronde.process_set import ProcessSet

_VARIABLE = "RONDE_HIERARCHICAL_ADASUM"


def is_asked_for() -> bool:
    """Returns whether hierarchical Adasum is enabled."""
    return os.environ.get(_VARIABLE) == "1"


def notes() -> list[str]:
    """Returns a message to the user if it is enabled in a program that has not imported `ronde.torch`."""
    if not is_asked_for() or "ronde.torch" in sys.modules:
        return []
    return [
        f"{_VARIABLE}=1 has no effect: only ronde.torch averages the ranks of a host first, and this program has not "
        "imported it before init (docs/PYTORCH.md)"
    ]


class Hosts:
    """The process sets of the two steps.

    client  -- the session
    hosts   -- for each rank of the job, in rank order, a string that ranks of the same host share
    """

    def __init__(self, client: Client, hosts: list[str]) -> None:
        self._client = client
        self._own: ProcessSet | None = None  # None if the other set, or the set of all ranks, is the same
        self._first: ProcessSet | None = None
        members = [[rank for rank, host in enumerate(hosts) if host == each] for each in dict.fromkeys(hosts)]
        mine = hosts[client.rank]
        self.leader = hosts.index(mine)
        self._is_one, self._are_single = len(members) == 1, len(members) == client.size
        if self._is_one or self._are_single:
            return
        for ranks in members:
            if len(ranks) > 1:
                added = client.add_process_set(ranks)
                self._own = added if client.rank in ranks else self._own
        self._first = client.add_process_set([ranks[0] for ranks in members])

    def begin(self, tensor: torch.Tensor, name: str | None, prescale: float, postscale: float, out: Any) -> InFlight:
        """Starts the first step. Its wait runs the second one, so all ranks must wait in the same order."""
        client = self._client
        if self._is_one:
            return client.allreduce_async(tensor, Average, name, prescale, postscale, out=out)
        if self._are_single:
            return client.allreduce_async(tensor, Adasum, name, prescale, postscale, out=out)
        return _TwoSteps(self, tensor, name, (prescale, postscale), out)

    def mean(self, tensor: torch.Tensor, name: str | None, prescale: float) -> InFlight | None:
        """Starts the mean of this host's ranks. Returns None on a host with one rank."""
        if self._own is None:
            return None
        return self._client.allreduce_async(tensor, Average, _part(name, "host"), prescale, process_set=self._own)

    def across(self, mean: torch.Tensor, name: str | None, scales: tuple[float, float], out: Any) -> torch.Tensor:
        """Computes the Adasum of all hosts' means on the first rank of each, and broadcasts it to the host's others."""
        client, (prescale, postscale) = self._client, scales
        result = mean
        if client.rank == self.leader:
            result = client.allreduce(
                mean, Adasum, _part(name, "across"), prescale, postscale, out=out, process_set=self._first
            )
        if self._own is not None:
            result = client.broadcast(result, self.leader, _part(name, "back"), out=out, process_set=self._own)
        return result


class _TwoSteps:
    """An operation whose first step is in flight."""

    def __init__(
        self, hosts: Hosts, tensor: torch.Tensor, name: str | None, scales: tuple[float, float], out: Any
    ) -> None:
        self._hosts, self._name, self._out = hosts, name, out
        prescale, postscale = scales
        self._mean = hosts.mean(tensor, name, prescale)
        # A host with one rank has nothing to average: the second step scales its tensor.
        self._tensor = tensor.clone() if self._mean is None else tensor
        self._scales = scales if self._mean is None else (1.0, postscale)

    def poll(self) -> bool:
        """Returns whether the first step is done. The second one, which is short, begins in `wait`."""
        return self._mean is None or self._mean.poll()

    def wait(self) -> Any:
        """Runs the second step and returns the result."""
        mean = self._tensor if self._mean is None else self._mean.wait()
        return self._hosts.across(mean, self._name, self._scales, self._out)


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"
