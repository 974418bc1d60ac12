"""`horovod.tensorflow.keras`, which is not there yet; importing its parent says so first."""

from horovod.absent import not_yet

raise not_yet("horovod.tensorflow.keras")
