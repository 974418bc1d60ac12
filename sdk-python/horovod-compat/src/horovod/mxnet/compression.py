"""Horovod's module for the names of `ronde.mxnet.compression`."""

from ronde.mxnet.compression import *  # noqa: F403
