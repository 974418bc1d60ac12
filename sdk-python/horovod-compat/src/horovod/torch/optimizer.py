"""Horovod's place for these: the names of `ronde.torch.optimizer`."""

from ronde.torch.optimizer import *  # noqa: F403
