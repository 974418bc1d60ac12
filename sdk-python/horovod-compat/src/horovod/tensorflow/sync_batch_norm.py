"""Horovod's module for the names of `ronde.tensorflow.sync_batch_norm`."""

from ronde.tensorflow.sync_batch_norm import *  # noqa: F403
