"""`horovod.tensorflow.keras`: the functions and classes of `ronde.tensorflow.keras`."""

from horovod.tensorflow.keras import callbacks as _callbacks
from horovod.tensorflow.keras import elastic as _elastic
from ronde.tensorflow import keras as _keras
from ronde.tensorflow.keras import *  # noqa: F403

callbacks = _callbacks  # type: ignore[misc]
elastic = _elastic  # type: ignore[misc]

__all__ = list(_keras.__all__)
