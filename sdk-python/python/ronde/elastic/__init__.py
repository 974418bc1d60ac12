"""Training that restores its last commit and continues when a collective fails: states, and the retry loop.

`ronde.torch.elastic` has both for PyTorch. The number of ranks does not change while a job runs.
"""

from ronde.elastic.loop import run_fn
from ronde.elastic.notification import NotificationManager, notification_manager
from ronde.elastic.state import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State

__all__ = [
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "NotificationManager",
    "ObjectState",
    "State",
    "notification_manager",
    "run_fn",
]
