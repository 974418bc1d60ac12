"""ronde: encrypted communication for data-parallel training.

    import ronde

    client = ronde.connect()
    mean = client.allreduce(gradient)

The program runs under `ronde run -np N python program.py`. `ronde.torch` has the distributed optimizer for PyTorch.
"""

from ronde._ronde import __version__
from ronde.client import Adasum, Average, Client, Handle, Max, Min, Product, Sum, connect
from ronde.errors import MismatchError, PeerLostError, RefusedError, RondeError, ShutDownError, TimedOutError

__all__ = [
    "Adasum",
    "Average",
    "Client",
    "Handle",
    "Max",
    "Min",
    "MismatchError",
    "PeerLostError",
    "Product",
    "RefusedError",
    "RondeError",
    "ShutDownError",
    "Sum",
    "TimedOutError",
    "__version__",
    "connect",
]
