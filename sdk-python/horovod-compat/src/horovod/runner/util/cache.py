"""A cache of results of checks, in a file, for some minutes."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import pickle
import stat
import tempfile
import threading
import time
from typing import Any, Callable

_FILE = "cache.bin"


class Cache:
    """Values by key, in a file of this user. Values of another program or of earlier parameters are ignored.

    cache_folder                         -- the folder of the file; created with mode 0700 if it does not exist
    cache_staleness_threshold_in_minutes -- how long a value is valid
    parameters_hash                      -- a hash of parameters that values depend on: another one empties the cache

    Raises PermissionError for a folder that other users may write to: values are pickled.
    """

    def __init__(
        self, cache_folder: str | os.PathLike[str], cache_staleness_threshold_in_minutes: float, parameters_hash: Any
    ) -> None:
        self._folder = pathlib.Path(cache_folder)
        self._age_max_s = cache_staleness_threshold_in_minutes * 60
        self._parameters = parameters_hash
        self._lock = threading.Lock()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError(f"{self._folder} can be written to by other users; give a folder of this user alone")
        self._values = self._read()

    def get(self, key: Any) -> Any:
        """Returns the value; None if there is none, or it is too old."""
        with self._lock:
            at, value = self._values.get(key, (float("-inf"), None))
        return value if 0 <= time.time() - at <= self._age_max_s else None

    def put(self, key: Any, val: Any) -> None:
        """Stores a value."""
        with self._lock:
            self._values[key] = (time.time(), val)
            self._write()

    def _read(self) -> dict[Any, tuple[float, Any]]:
        # There is no file yet, or one of another release: repeat the checks.
        with contextlib.suppress(OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError):
            parameters, values = pickle.loads((self._folder / _FILE).read_bytes())
            if parameters == self._parameters:
                return dict(values)
        return {}

    def _write(self) -> None:
        descriptor, path = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump((self._parameters, self._values), file)
        os.replace(path, self._folder / _FILE)


def use_cache() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds the argument `fn_cache`: a `Cache` for results, or None."""

    def wrap(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def wrapper(*args: Any, fn_cache: Cache | None = None, **kwargs: Any) -> Any:
            if fn_cache is None:
                return func(*args, **kwargs)
            key = (func.__name__, args, frozenset(kwargs.items()))
            found = fn_cache.get(key)
            if found is None:
                found = func(*args, **kwargs)
                fn_cache.put(key, found)
            return found

        return wrapper

    return wrap
