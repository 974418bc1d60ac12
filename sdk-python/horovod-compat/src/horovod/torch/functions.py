"""Horovod's module for the names of `ronde.torch.functions` and `ronde.torch.objects`."""

from ronde.torch.functions import *  # noqa: F403
from ronde.torch.objects import *  # noqa: F403
