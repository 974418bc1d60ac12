"""`horovod.keras`: the functions and classes of `ronde.keras`.

On the back end TensorFlow, collectives return tensors, and ranks that disagree raise FailedPreconditionError.
"""

from horovod.keras import callbacks as _callbacks
from horovod.keras import elastic as _elastic
from ronde import keras as _keras
from ronde.keras import *  # noqa: F403
from ronde.keras.backend import NAME as _BACKEND

if _BACKEND == "tensorflow":
    # As in Horovod; `ronde.keras` returns arrays on all back ends.
    from horovod.tensorflow.keras import allgather, allreduce, broadcast, reducescatter  # noqa: F401

callbacks = _callbacks  # type: ignore[misc]
elastic = _elastic  # type: ignore[misc]

__all__ = list(_keras.__all__)
