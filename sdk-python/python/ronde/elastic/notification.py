"""Notifications that the hosts of a job have changed, and the states that receive them."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Protocol

ADDED, REMOVED = 2, 1

# The number of the next membership, and how many workers it adds and removes.
Change = tuple[int, int, int]
Source = Callable[[], "Change | None"]


class Listener(Protocol):
    """An object that is notified of changed hosts, such as a `State`."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """The hosts have changed."""


class NotificationManager:
    """Notifies the states that train of changed hosts. All methods may be called in any thread.

    `run_fn` registers its state while its function runs. In an elastic job the session receives a message when the
    membership is about to change, and a state asks for it by `poll` at each commit. A program that watches hosts by
    itself calls `handle_hosts_updated` in the process of rank 0.

    replays -- how often the session has entered another membership by itself (on_failure="continue")
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._source: Source | None = None
        self.replays = 0

    def init(self, *_: Any, **__: Any) -> None:
        """Does nothing, whatever the arguments: Horovod's are addresses of its rendezvous server."""

    def note_replay(self) -> None:
        """Notes that the session has entered another membership to complete operations that a loss interrupted."""
        with self._lock:
            self.replays += 1

    def follow(self, source: Source | None) -> None:
        """Sets where `poll` gets changes from, usually `Client.membership_change`; None for nowhere."""
        with self._lock:
            self._source = source

    def poll(self) -> None:
        """Notifies all listeners if the session has received a change of the membership since the last call."""
        with self._lock:
            source = self._source
        change = None if source is None else source()
        if change is not None:
            _, added, removed = change
            self.handle_hosts_updated(time.time(), (ADDED if added else 0) | (REMOVED if removed else 0))

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

        timestamp  -- when, in seconds; a state ignores a notification that is not later than its last one since the
                      session began
        update_res -- how, of `HostUpdateResult`
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()
"""The process's own manager, which `run_fn` uses."""
