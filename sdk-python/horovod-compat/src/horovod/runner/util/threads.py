"""Runs functions in threads: one, one after an event, or many with their results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from collections.abc import Sequence


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls `target(*args)`, and returns it.

    silent -- drops an exception of the function, which is printed otherwise

    Raises ValueError if `args` is not a tuple.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}; for a single argument use (arg,)")

    def call() -> None:
        with contextlib.suppress(Exception) if silent else contextlib.nullcontext():
            target(*args)

    thread = threading.Thread(target=call, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls `func(*args)` once the event is set, and returns it.

    stop                  -- if set before the event, ends the thread without the call
    check_stop_interval_s -- how often to check it
    silent                -- as for `in_thread`

    Raises ValueError without an event, and if `args` is not a tuple.
    """
    if event is None:
        raise ValueError("Event must not be None")
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}; for a single argument use (arg,)")

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        func(*args)

    return in_thread(wait, name=f"on event {getattr(func, '__name__', '')}", daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls `fn(*args)` for each item of `args_list`, each in a thread. Returns the results by the item's index.

    block_until_all_done      -- False to return None at once, while the calls continue
    max_concurrent_executions -- how many calls run at the same time

    Raises the exception of the first item whose call failed, after all calls have ended.
    """
    if not args_list:
        return {} if block_until_all_done else None
    executor = concurrent.futures.ThreadPoolExecutor(min(len(args_list), max_concurrent_executions))
    calls = [executor.submit(fn, *args) for args in args_list]
    executor.shutdown(wait=block_until_all_done)
    return {number: call.result() for number, call in enumerate(calls)} if block_until_all_done else None
