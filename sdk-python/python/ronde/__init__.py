"""ronde: encrypted communication for data-parallel training.

    import ronde

    client = ronde.connect()
    mean = client.allreduce(gradient)

Start the program with `ronde run -np N python program.py`, or call a function on N ranks with `ronde.run`.
`ronde.torch` has the distributed optimizer for PyTorch.
"""

import sys as _sys

if not _sys.platform.startswith("linux"):
    raise ImportError(
        f"ronde runs on Linux only, and this is {_sys.platform}: workers and sidecars share sealed memory over Unix "
        "sockets. Run the program in a Linux container or virtual machine (docs/DEPLOYMENT.md)",
        name="ronde",
    )

from ronde._ronde import __version__
from ronde.client import Client, SharedMemory, connect
from ronde.device import GpuArray
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
    "GpuArray",
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
