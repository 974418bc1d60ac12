"""`horovod.torch`: the functions and classes of `ronde.torch`."""

from ronde import torch as _torch
from ronde.torch import *  # noqa: F403

__all__ = [*_torch.__all__]  # noqa: PLE0604
