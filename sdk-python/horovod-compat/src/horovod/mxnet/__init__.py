"""`horovod.mxnet`: the functions and classes of `ronde.mxnet`."""

from horovod.mxnet import compression, functions, mpi_ops  # noqa: F401 -- hvd.mpi_ops
from ronde import mxnet as _mxnet
from ronde.mxnet import *  # noqa: F403
from ronde.mxnet import Adasum as AdaSum

__all__ = ["AdaSum", *_mxnet.__all__]  # noqa: PLE0604
