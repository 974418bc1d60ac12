"""`horovod.torch`: the functions and classes of `ronde.torch`."""

from horovod.torch import compression, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401 -- hvd.mpi_ops
from ronde import torch as _torch
from ronde.torch import *  # noqa: F403

__all__ = [*_torch.__all__]  # noqa: PLE0604
