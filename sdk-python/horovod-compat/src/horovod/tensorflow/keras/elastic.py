"""`horovod.tensorflow.keras.elastic`: the names of `ronde.tensorflow.keras.elastic`."""

from ronde.tensorflow.keras.elastic import *  # noqa: F403
