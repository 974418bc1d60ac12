"""Horovod's module for the names of `ronde.mxnet`, including collectives, reduce operators and queries."""

from ronde.mxnet import *  # noqa: F403
from ronde.mxnet.mpi_ops import *  # noqa: F403
