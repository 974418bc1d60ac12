"""Services of Horovod's launcher that horovod-compat has: the registry of compute jobs."""
