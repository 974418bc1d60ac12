"""Horovod's module for the names of `ronde.torch.compression`."""

from ronde.torch.compression import *  # noqa: F403
