"""`horovod.torch`: the functions and classes of `ronde.torch`."""

from horovod.torch import compression, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401 -- hvd.mpi_ops
from horovod.torch import elastic as _elastic
from ronde import torch as _torch
from ronde.torch import *  # noqa: F403
from ronde.torch import Adasum as AdaSum

# `ronde.torch` has a module of this name, too, but without Horovod's submodules.
elastic = _elastic  # type: ignore[misc]

__all__ = ["AdaSum", *_torch.__all__]  # noqa: PLE0604
