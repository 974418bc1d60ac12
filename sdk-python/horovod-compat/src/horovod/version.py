"""Which Horovod this answers for."""

# Scripts compare it, so it is the release whose calls are meant and not ronde's own.
__version__ = "0.28.1"
