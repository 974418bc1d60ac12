"""`horovod.tensorflow.keras`, which is not supported yet. Importing its parent raises the error first."""

from horovod.absent import unsupported_module

raise unsupported_module("horovod.tensorflow.keras")
