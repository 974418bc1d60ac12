"""A store that is opened by its first use."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Callable

from torch._C._distributed_c10d import Store

if TYPE_CHECKING:
    import datetime


class LazyStore(Store):
    """A store of `torch.distributed` that is opened by the first use of its contents.

    open_store -- opens the store
    """

    # C++ holds these objects without their part in Python, until `release`.
    _alive: list[LazyStore] = []  # noqa: RUF012

    def __init__(self, open_store: Callable[[], Any], parent: LazyStore | None = None) -> None:
        super().__init__()
        self._open_store = open_store
        self._opened: Any = None
        self._timeout: datetime.timedelta | None = None
        self._lock = threading.Lock()
        self._root: LazyStore = self if parent is None else parent._root
        self._alive.append(self)

    def _store(self) -> Any:
        with self._lock:
            if self._opened is None:
                self._opened = self._open_store()
                if self._timeout is not None:
                    self._opened.set_timeout(self._timeout)
            return self._opened

    def clone(self) -> LazyStore:
        """Returns another connection to the store, which is opened by its first use, too."""
        return LazyStore(lambda: self._store().clone(), self)

    def open(self) -> None:
        """Opens the store, unless that was done. Raises what opening it raises."""
        self._store()

    def release(self) -> None:
        """Closes the store and its clones, which nothing may use after this."""
        for store in [store for store in self._alive if store._root is self._root]:
            self._alive.remove(store)
            store._opened = None

    def is_open(self) -> bool:
        """Returns whether the store was used."""
        return self._opened is not None

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of later waits."""
        super().set_timeout(timeout)
        self._timeout = timeout
        if self._opened is not None:
            self._opened.set_timeout(timeout)


def _passing(name: str) -> Callable[..., Any]:
    def call(self: LazyStore, *arguments: Any) -> Any:
        return getattr(self._store(), name)(*arguments)

    call.__name__ = name
    call.__doc__ = f"Calls `{name}` of the opened store."
    return call


_METHODS = [
    "set",
    "get",
    "add",
    "compare_set",
    "delete_key",
    "num_keys",
    "wait",
    "append",
    "check",
    "multi_get",
    "multi_set",
    "has_extended_api",
    "queue_push",
    "queue_pop",
    "queue_len",
    "list_keys",
]
for _name in _METHODS:
    setattr(LazyStore, _name, _passing(_name))
