"""Horovod's module for the names of `ronde.mxnet.functions`."""

from ronde.mxnet.functions import *  # noqa: F403
