"""Elastic training from `ronde.elastic`: states, the retry loop, notifications of changed hosts."""

from ronde.elastic import (
    HostsUpdatedInterrupt,
    HostUpdateResult,
    NotificationManager,
    ObjectState,
    State,
    notification_manager,
    run_fn,
)
from ronde.errors import RondeError as HorovodInternalError

WorkerNotificationManager = NotificationManager

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "run_fn",
]
