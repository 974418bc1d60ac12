"""Values that rank 0 of an elastic job reports by `ronde.ray.log`, for callbacks of the driver."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any, Callable

from ronde.cluster.agent import VALUE, in_order
from ronde.private_folder import PrivateFolder

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

_log = logging.getLogger("ronde.ray")
_POLL_S = 0.5


class ElasticReports:
    """Calls callbacks with the values that workers leave in the folder of the call, in a thread.

    callbacks -- called with each value, those of each worker in their order
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self._callbacks = tuple(callbacks)
        self._failure: Exception | None = None
        self._running: Callable[[Any], Any] | None = None
        self._stopped, self._abandoned = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, path: pathlib.Path) -> None:
        """Starts the thread, unless there are no callbacks.

        path -- of the folder of the call
        """
        if self._callbacks:
            self._thread = threading.Thread(target=self._deliver, args=(path,), name="ronde-ray-reports", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises the first exception of a callback, if there is one."""
        if self._failure is not None:
            raise self._failure

    def log_failure(self, raised: BaseException) -> None:
        """Logs the first exception of a callback, if another one is raised."""
        if self._failure is not None and self._failure is not raised:
            _log.error(
                "a callback has failed for a value that rank 0 reported; the error that is raised is another one",
                exc_info=self._failure,
            )

    def end(self, timeout: float | None) -> None:
        """Ends the thread, after it has delivered what there is.

        timeout -- seconds after which a callback that still runs is left alone, with a message; None: it is waited for
        """
        self._stopped.set()
        if self._thread is None:
            return
        try:
            self._thread.join(timeout)
        finally:
            # Also after an interrupt here.
            self._abandoned.set()
        if self._thread.is_alive():
            running = self._running
            name = getattr(running, "__qualname__", None) or repr(running)
            _log.warning(
                "the callback %s has not returned within %.0f s after the end of the job; it runs on in a thread that "
                "ends with this process, and gets no more values",
                name, timeout or 0.0,
            )  # fmt: skip

    def _deliver(self, path: pathlib.Path) -> None:
        with contextlib.closing(PrivateFolder(path)) as folder:
            is_last = False
            while not is_last:
                is_last = self._stopped.wait(_POLL_S)
                for name in in_order(name for name in os.listdir(path) if name.startswith(f"{VALUE}.")):
                    content = folder.read(name)
                    (path / name).unlink()
                    self._call(content)
                    # The caller goes on, and removes the folder.
                    if self._abandoned.is_set():
                        return

    def _call(self, content: bytes) -> None:
        try:
            value = pickle.loads(content)
        except Exception:  # what the classes of the program raise
            _log.exception("a value that a rank reported cannot be unpickled here; it is dropped, and the job goes on")
            return
        for callback in self._callbacks:
            self._running = callback
            try:
                callback(value)
            except Exception as error:
                if self._failure is None:
                    self._failure = error
                else:
                    _log.exception("a further callback has failed for a value that rank 0 reported")
            self._running = None
            if self._abandoned.is_set():
                return
