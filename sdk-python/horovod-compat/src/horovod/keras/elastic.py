"""`horovod.keras.elastic`: the names of `ronde.keras.elastic`."""

from ronde.keras.elastic import *  # noqa: F403
