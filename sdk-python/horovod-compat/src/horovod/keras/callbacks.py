"""`horovod.keras.callbacks`: the callbacks of `ronde.keras`."""

from ronde.keras.callbacks import *  # noqa: F403
