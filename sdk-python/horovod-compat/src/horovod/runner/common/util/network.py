"""`horovod.runner.common.util.network`, which horovod-compat omits for security; importing it raises ImportError."""

raise ImportError(
    "horovod.runner.common.util.network is left out of horovod-compat: its services unpickle what they receive over "
    "the network. Addresses of this host are in horovod.runner.util.network; objects travel between ranks by "
    "horovod.torch.broadcast_object and allgather_object",
    name=__name__,
)
