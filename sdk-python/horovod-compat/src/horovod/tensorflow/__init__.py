"""`horovod.tensorflow`: the functions and classes of `ronde.tensorflow`."""

from horovod.tensorflow import compression, functions, mpi_ops, sync_batch_norm  # noqa: F401 -- hvd.mpi_ops
from horovod.tensorflow import elastic as _elastic
from ronde import _ronde
from ronde import tensorflow as _tensorflow
from ronde.tensorflow import *  # noqa: F403
from ronde.tensorflow import Adasum as AdaSum

# Ranks that disagree raise FailedPreconditionError, as in Horovod.
_ronde.use_horovods_codes()

# `ronde.tensorflow` has a module of this name, too, but without Horovod's other names.
elastic = _elastic  # type: ignore[misc]

__all__ = ["AdaSum", *_tensorflow.__all__]  # noqa: PLE0604
