"""`horovod.keras`, which is not there yet."""

from horovod.absent import not_yet

raise not_yet("horovod.keras")
