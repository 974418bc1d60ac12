"""The import name `horovod`, implemented by ronde: scripts written for Horovod and PyTorch run unchanged.

`horovod.torch` is `ronde.torch`, `horovod.run` is `ronde.run` with Horovod's arguments, and the command `horovodrun`
runs `ronde run`. `horovod.common` and `horovod.runner` have Horovod's helper functions. docs/MIGRATING.md of ronde
lists the differences.
"""

from horovod.runner import run
from horovod.version import __version__

__all__ = ["__version__", "run"]
