"""Data loaders of any framework, and reading ahead for them."""

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

# How long a reader may still be inside `_iterate` when its batches are not wanted any more.
CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger("ronde.data")


class BaseDataLoader(ABC):
    """A loader of batches: says how many there are, how to read them, and what to do with each before it is used."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches of one pass."""

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """Reads the batches of one pass."""

    def _process_batch(self, batch: Any) -> Any:
        """What is yielded for a batch, such as the batch on a device; by default the batch itself."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Makes a loader read ahead: a thread runs `_iterate` and fills a queue, from which the iteration takes batches.

        class Loader(AsyncDataLoaderMixin, MyLoader): ...

    It stands in front of the loader, and hands it all further arguments. Each pass has a thread of its own, which ends
    with the pass, also with one that is left early. `_process_batch` runs in the thread that iterates. What `_iterate`
    raises is raised by the iteration, after the batches before it.

    async_loader_queue_size -- how many batches are read ahead; 0 for none: then there is no thread
    debug_data_loader       -- logs (`ronde.data`, at level info) how long each batch was waited for
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(f"async_loader_queue_size is {async_loader_queue_size}; it is at least 0")
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readers: weakref.WeakSet[_Reader] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """Ends the passes that are under way, and their threads. The loader may be iterated over again."""
        for reader in list(self._readers):
            reader.close()

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        reader = _Reader(self._iterate, self.async_loader_queue_size)  # type: ignore[attr-defined]
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


# What is in the queue: a batch, the end of the pass, or why it ended before.
_BATCH, _END, _ERROR = object(), object(), object()


class _Reader:
    """A thread that reads one pass, and the queue that it fills."""

    def __init__(self, iterate: Callable[[], Iterator[Any]], size: int) -> None:
        self._iterate = iterate
        self._queue: queue.Queue[tuple[object, Any]] = queue.Queue(size)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="ronde-data-reader", daemon=True)
        self._thread.start()

    def take(self) -> tuple[object, Any]:
        """What is next; waits for it."""
        return self._queue.get()

    def ready(self) -> int:
        """How many batches can be taken at once."""
        return self._queue.qsize()

    def close(self) -> None:
        """Ends the thread, and a `take` that waits; does nothing the second time."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        # Makes room for what the thread may be about to put in; behind that it looks whether it is wanted.
        self._drain()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning(
                "the reader of a pass that was left is still reading after %s s; it ends then", CLOSE_TIMEOUT_S
            )
        self._put_end()

    def _put_end(self) -> None:
        """Replaces what is left by the end. A thread that is still alive puts in one batch more, at any time."""
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
                self._queue.put((_BATCH, batch))
                if self._is_closed.is_set():
                    return
            last: tuple[object, Any] = (_END, None)
        except BaseException as error:
            last = (_ERROR, error)
        if not self._is_closed.is_set():
            self._queue.put(last)
