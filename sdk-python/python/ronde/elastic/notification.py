"""Notifications that the hosts of a job have changed, and the states that receive them."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Listener(Protocol):
    """An object that is notified of changed hosts, such as a `State`."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """The hosts have changed."""


class NotificationManager:
    """Notifies the states that train of changed hosts. All methods may be called in any thread.

    `run_fn` registers its state while its function runs. The hosts of a job of ronde do not change, so ronde sends no
    notification: a program that watches the hosts calls `handle_hosts_updated` in the process of rank 0.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(self, *_: Any, **__: Any) -> None:
        """Does nothing, whatever the arguments: Horovod's are addresses of its rendezvous server."""

    def register_listener(self, listener: Listener) -> None:
        """Adds a listener. One that is registered twice is notified once."""
        with self._lock:
            if not any(known is listener for known in self._listeners):
                self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Removes a listener; does nothing for one that is not registered."""
        with self._lock:
            self._listeners = [known for known in self._listeners if known is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notifies all listeners that the hosts have changed.

        timestamp  -- when, in seconds; a state ignores a notification that is not later than its last one
        update_res -- how, of `HostUpdateResult`
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()
"""The process's own manager, which `run_fn` uses."""
