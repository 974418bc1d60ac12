"""ronde: encrypted communication for data-parallel training.

    import ronde

    client = ronde.connect()
    mean = client.allreduce(gradient)

Start the program with `ronde run -np N python program.py`, or call a function on N ranks with `ronde.run`.
`ronde.torch` has the distributed optimizer for PyTorch.
"""

from ronde._ronde import __version__
from ronde.client import Client, SharedMemory, connect
from ronde.errors import (
    FailureRecord,
    LastCall,
    MismatchError,
    PeerLostError,
    RefusedError,
    RondeError,
    ShutDownError,
    TimedOutError,
)
from ronde.handle import GroupHandle, Handle, MessageHandle
from ronde.ops import Adasum, Average, BitAnd, BitOr, BitXor, ClippedMean, Max, Median, Min, Product, Sum
from ronde.plugins import Plugin, PluginOp
from ronde.process_set import ProcessSet
from ronde.run import run
from ronde.tensors import Bfloat16

__all__ = [
    "Adasum",
    "Average",
    "Bfloat16",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Client",
    "ClippedMean",
    "FailureRecord",
    "GroupHandle",
    "Handle",
    "LastCall",
    "Max",
    "Median",
    "MessageHandle",
    "Min",
    "MismatchError",
    "PeerLostError",
    "Plugin",
    "PluginOp",
    "ProcessSet",
    "Product",
    "RefusedError",
    "RondeError",
    "SharedMemory",
    "ShutDownError",
    "Sum",
    "TimedOutError",
    "__version__",
    "connect",
    "run",
]
