"""Training that restores its last commit and continues when a collective fails: states, and the retry loop.

`ronde.torch.elastic` has both for PyTorch. In an elastic job (`ronde run --min-np`, docs/ELASTIC.md) workers come and
go while the program runs; in other jobs the number of ranks is fixed.
"""

from ronde.elastic.loop import RemovedFromJob, StateLostError, run_fn
from ronde.elastic.membership import is_elastic
from ronde.elastic.notification import NotificationManager, notification_manager
from ronde.elastic.state import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State, StateCorruptError

__all__ = [
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "NotificationManager",
    "ObjectState",
    "RemovedFromJob",
    "State",
    "StateCorruptError",
    "StateLostError",
    "is_elastic",
    "notification_manager",
    "run_fn",
]
