"""The release of Horovod that this package implements."""

# Scripts compare this version, so it is Horovod's and not ronde's.
__version__ = "0.28.1"
