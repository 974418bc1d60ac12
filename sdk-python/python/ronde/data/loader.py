"""Data loaders for any framework, and prefetching for them."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long `close` waits for a reader that is inside `_iterate`.
CLOSE_TIMEOUT_S = 10.0
# How often a reader that waits for room in the queue checks whether it was closed.
_POLL_S = 0.5

_log = logging.getLogger("ronde.data")
# One for all loaders: a loader with a lock could not be pickled.
_readers_lock = threading.Lock()


class BaseDataLoader(ABC):
    """A loader of batches. A subclass defines their number, how to read them, and how to process each one."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches of one pass."""

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """Reads the batches of one pass."""

    def _process_batch(self, batch: Any) -> Any:
        """Returns what the iteration yields for a batch, for example the batch on a device; by default the batch."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Prefetches batches: a thread runs `_iterate` and fills a queue, from which the iteration takes batches.

        class Loader(AsyncDataLoaderMixin, MyLoader): ...

    It precedes the loader among the base classes and passes all further arguments to it. Each pass has its own thread,
    which ends with the pass, even if the pass is left early. `_process_batch` runs in the iterating thread. The
    iteration raises exceptions of `_iterate`, after the batches before them.

    async_loader_queue_size -- how many batches to prefetch; 0 disables prefetching and the thread
    debug_data_loader       -- logs (`ronde.data`, at level info) how long the iteration waits for each batch
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(f"async_loader_queue_size is {async_loader_queue_size}; it is at least 0")
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readers: weakref.WeakSet[_Reader] = weakref.WeakSet()  # changed and iterated over with the lock held
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends all running passes and their threads. The loader may be iterated over again."""
        with _readers_lock:
            readers = list(self._readers)
        for reader in readers:
            reader.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        reader = _Reader(self._iterate, self.async_loader_queue_size)  # type: ignore[attr-defined]
        with _readers_lock:
            self._readers.add(reader)
        try:
            while True:
                start = time.monotonic()
                kind, content = reader.take()
                if self.debug_data_loader:
                    _log.info("waited %.3f s, %d batches are ready", time.monotonic() - start, reader.ready())
                if kind is _END:
                    return
                if kind is _ERROR:
                    raise content
                yield self._process_batch(content)  # type: ignore[attr-defined]
        finally:
            reader.close()


# Kinds of queue items: a batch, the end of the pass, or the error that ended it.
_BATCH, _END, _ERROR = object(), object(), object()


class _Reader:
    """The thread that reads one pass, and the queue that it fills."""

    def __init__(self, iterate: Callable[[], Iterator[Any]], size: int) -> None:
        self._iterate = iterate
        self._queue: queue.Queue[tuple[object, Any]] = queue.Queue(size)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="ronde-data-reader", daemon=True)
        self._thread.start()

    def take(self) -> tuple[object, Any]:
        """Waits for the next item and returns it."""
        return self._queue.get()

    def ready(self) -> int:
        """Returns how many batches are in the queue."""
        return self._queue.qsize()

    def close(self) -> None:
        """Ends the thread and a waiting `take`. A second call does nothing."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        # Make room for an item that the thread may be about to put in. After that it checks `_is_closed`.
        self._drain()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning(
                "the reader of a pass that was left is still reading after %s s; it ends then", CLOSE_TIMEOUT_S
            )
        self._put_end()

    def _put_end(self) -> None:
        """Replaces the remaining items by the end. A thread that is still alive may be adding one more batch now."""
        for _ in range(2):
            self._drain()
            try:
                self._queue.put_nowait((_END, None))
            except queue.Full:
                continue
            return

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            return

    def _read(self) -> None:
        try:
            for batch in self._iterate():
                self._put((_BATCH, batch))
                if self._is_closed.is_set():
                    return
            last: tuple[object, Any] = (_END, None)
        except BaseException as error:
            last = (_ERROR, error)
        self._put(last)

    def _put(self, item: tuple[object, Any]) -> None:
        """Adds an item when there is room. Adds none after `close`: nobody would take it, nor make room for it."""
        while not self._is_closed.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return
