"""`horovod.tensorflow.keras.callbacks`: the callbacks of `ronde.tensorflow.keras`."""

from ronde.tensorflow.keras.callbacks import *  # noqa: F403
