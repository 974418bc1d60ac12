"""Calls on threads of their own, for tests and for workers whose ranks are threads."""

from __future__ import annotations

import threading
from typing import Any, Callable


def together(*calls: Callable[[], Any], timeout_s: float = 60.0) -> list[Any]:
    """Makes calls on threads of their own. Returns their results or errors, in the order of the calls.

    timeout_s -- how long one may take; the error of one that takes longer has its number
    """
    results: list[Any] = [None] * len(calls)

    def make(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=make, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for number, thread in enumerate(threads):
        thread.join(timeout_s)
        assert not thread.is_alive(), f"call {number} of {len(calls)} has not ended within {timeout_s} s"
    return results
