"""`horovod.ray`, which is not supported yet."""

from horovod.absent import unsupported_module

raise unsupported_module("horovod.ray")
