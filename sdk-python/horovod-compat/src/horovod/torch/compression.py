"""Horovod's place for these: the names of `ronde.torch.compression`."""

from ronde.torch.compression import *  # noqa: F403
