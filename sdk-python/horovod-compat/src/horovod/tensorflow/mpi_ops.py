"""Horovod's module for the names of `ronde.tensorflow`, including collectives, reduce operators and queries."""

from ronde.tensorflow import *  # noqa: F403
from ronde.tensorflow.mpi_ops import *  # noqa: F403
