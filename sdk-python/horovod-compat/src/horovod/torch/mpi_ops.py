"""Horovod's module for the names of `ronde.torch`, including collectives and reduce operators."""

from horovod.common.basics import HorovodBasics
from horovod.common.util import get_average_backwards_compatibility_fun
from horovod.torch.autograd import (  # noqa: F401
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    HorovodGroupedAllreduce,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
)
from ronde.torch import *  # noqa: F403
from ronde.torch.mpi_ops import *  # noqa: F403

_basics = HorovodBasics()
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
