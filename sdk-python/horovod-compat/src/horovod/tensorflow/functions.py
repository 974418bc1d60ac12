"""Horovod's module for the names of `ronde.tensorflow.functions`."""

from ronde.tensorflow.functions import *  # noqa: F403
