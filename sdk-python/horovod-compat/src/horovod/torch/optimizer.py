"""Horovod's module for the names of `ronde.torch.optimizer`, and the classes of distributed optimizers.

The result of `DistributedOptimizer` is an instance of `_DistributedOptimizer`, or with op=Adasum of
`_DistributedAdasumOptimizer`. Only that function creates them: the classes are mixins over the given optimizer's class
and have no constructor.
"""

from ronde.torch.adasum import AdasumDistributed as _DistributedAdasumOptimizer  # noqa: F401
from ronde.torch.optimizer import *  # noqa: F403
from ronde.torch.optimizer import DistributedOptimizer  # noqa: F401
from ronde.torch.optimizer import _Distributed as _DistributedOptimizer  # noqa: F401
