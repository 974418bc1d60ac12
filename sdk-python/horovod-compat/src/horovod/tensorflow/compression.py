"""Horovod's module for the names of `ronde.tensorflow.compression`."""

from ronde.tensorflow.compression import *  # noqa: F403
