"""Notices that the hosts of a job have changed, and the states that are told of them."""

from __future__ import annotations

import threading
from typing import Any, Protocol


class Listener(Protocol):
    """An object that is told of changed hosts, such as a `State`."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """The hosts have changed."""


class NotificationManager:
    """Passes notices of changed hosts on to the states that train. All methods may be called in any thread.

    `run_fn` registers its state while its function runs. The hosts of a job of ronde do not change, so no notice comes
    by itself: a program that watches over the hosts calls `handle_hosts_updated` in the process of rank 0.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []

    def init(self, *_: Any, **__: Any) -> None:
        """Does nothing, whatever the arguments: Horovod's are addresses of its rendezvous server."""

    def register_listener(self, listener: Listener) -> None:
        """Has the listener told of changed hosts; once, however often it is registered."""
        with self._lock:
            if not any(known is listener for known in self._listeners):
                self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Has the listener not told any more; does nothing for one that is not registered."""
        with self._lock:
            self._listeners = [known for known in self._listeners if known is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tells all listeners that the hosts have changed.

        timestamp  -- when, in seconds; a notice counts when it is later than the last one
        update_res -- how, of `HostUpdateResult`
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()
"""The process's own manager, which `run_fn` uses."""
