"""Horovod's place for these: the names of `ronde.torch.optimizer`, and the classes of what it returns.

`isinstance(optimizer, _DistributedOptimizer)` holds for what `DistributedOptimizer` returns, and with op=Adasum
`isinstance(optimizer, _DistributedAdasumOptimizer)`. Make them by that function: the classes are laid over that of the
optimizer given, and have no constructor of their own.
"""

from ronde.torch.adasum import AdasumDistributed as _DistributedAdasumOptimizer  # noqa: F401
from ronde.torch.optimizer import *  # noqa: F403
from ronde.torch.optimizer import DistributedOptimizer  # noqa: F401
from ronde.torch.optimizer import _Distributed as _DistributedOptimizer  # noqa: F401
