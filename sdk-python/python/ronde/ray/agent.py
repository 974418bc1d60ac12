"""The actor that runs an agent of `ronde run` on a node of Ray, and holds the resources of the workers there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ronde.cluster import agent
from ronde.cluster.agent import gpus_of_host
from ronde.ray.nodes import describe

if TYPE_CHECKING:
    from ronde.cluster.layout import Place

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_gpus(path: str) -> None:
    """Lets this worker see the GPUs that Ray has given to the workers of its node.

    path -- of the folder of the call
    """
    os.environ[_VISIBLE] = gpus_of_host(path)


class Agent(agent.Agent):
    """The actor. Ray calls its methods in several threads; `ronde.cluster.agent` describes the arguments."""

    def __init__(self, folder: str, call: bytes, host: str) -> None:
        super().__init__(folder, call, host, os.environ.get(_VISIBLE, ""))

    def place(self) -> Place:
        """Returns where this actor runs."""
        return describe()
