"""`horovod.keras`: the functions and classes of `ronde.keras`."""

from horovod.keras import callbacks as _callbacks
from horovod.keras import elastic as _elastic
from ronde import keras as _keras
from ronde.keras import *  # noqa: F403

callbacks = _callbacks  # type: ignore[misc]
elastic = _elastic  # type: ignore[misc]

__all__ = list(_keras.__all__)
