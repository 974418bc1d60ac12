"""Horovod's place for these: what `ronde.torch` has, the collectives and reduce operators among it."""

from ronde.torch import *  # noqa: F403
from ronde.torch.mpi_ops import *  # noqa: F403
