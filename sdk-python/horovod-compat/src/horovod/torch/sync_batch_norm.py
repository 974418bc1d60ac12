"""Horovod's module for the names of `ronde.torch.sync_batch_norm`."""

from ronde.torch.sync_batch_norm import *  # noqa: F403
