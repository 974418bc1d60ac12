"""`Work` of torch.distributed without a sidecar: threads that complete its future, and that wait for it."""

from __future__ import annotations

import contextlib
import datetime
import threading
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from ronde.errors import RondeError, TimedOutError  # noqa: E402
from ronde.torch.distributed import streams  # noqa: E402
from ronde.torch.distributed.progress import Lane  # noqa: E402
from ronde.torch.distributed.work import Call, Operation  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 60.0


class Complete:
    """A handle of an operation that is complete."""

    def poll(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None


class AloneLane:
    """The lane of one operation."""

    def complete(self, operation: Operation, until: float) -> bool:
        return operation.complete(until)

    def watch(self) -> None:
        """Nobody finishes it but the test."""


def completed(error: Exception | None = None) -> tuple[Operation, Any]:
    """An operation that a thread has finished and not yet published, and its future."""

    def finish(result: Any) -> list[torch.Tensor]:
        if error is not None:
            raise error
        return [torch.ones(1)]

    call = Call("test", 4, lambda notify: Complete(), finish)
    lane: Any = AloneLane()
    operation = Operation(lane, call, datetime.timedelta(seconds=TIMEOUT_S))
    operation.submit(True)
    future = operation.get_future()
    assert operation.complete(operation.deadline)
    assert not future.done()
    return operation, future


def started(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(TIMEOUT_S)
    return not thread.is_alive()


@pytest.mark.parametrize("error", [None, RuntimeError("planted")])
def test_a_wait_returns_when_the_future_is_complete(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Also if another thread is about to complete it: here one that waits for a GPU before."""
    operation, future = completed(error)
    inside, go = threading.Event(), threading.Event()

    def synchronize(events: Any) -> None:
        inside.set()
        assert go.wait(TIMEOUT_S)

    monkeypatch.setattr(streams, "synchronize", synchronize)
    first = started(operation.publish)
    assert inside.wait(TIMEOUT_S)
    found: list[Any] = []

    def wait() -> None:
        try:
            operation.wait()
        except RuntimeError as raised:
            found.append(raised)
        found.append(future.done())

    second = started(wait)
    second.join(0.2)
    assert second.is_alive()
    go.set()
    assert ended(first)
    assert ended(second)
    assert found == ([True] if error is None else [error, True])


def test_a_callback_may_wait_for_its_operation() -> None:
    """In its own thread, and in another one whose end it awaits."""
    operation, future = completed()
    found: list[Any] = []

    def callback(done: Any) -> None:
        found.append(operation.wait())
        found.append(ended(started(operation.wait)))

    future.then(callback)
    assert ended(started(operation.publish))
    assert found == [True, True]


def test_a_failure_of_a_gpu_is_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nobody would complete the future, and waits for it would not end."""
    operation, future = completed()

    def synchronize(events: Any) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(streams, "synchronize", synchronize)
    operation.publish()
    assert future.done()
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        future.wait()
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        operation.wait()


def test_an_interrupt_completes_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may raise in the thread that waits for the GPU; other threads wait for the future."""
    operation, future = completed()

    def synchronize(events: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(streams, "synchronize", synchronize)
    with pytest.raises(KeyboardInterrupt):
        operation.publish()
    assert future.done()
    with pytest.raises(RondeError, match="was interrupted: KeyboardInterrupt"):
        operation.wait()


class InFlight:
    """A handle of an operation that another rank has not called."""

    def poll(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> None:
        raise TimeoutError


class NoCompleter:
    """No thread finishes operations but those that wait for them."""

    def watch(self, lane: Lane) -> None:
        pass

    def publish(self, completed: list[Operation]) -> None:
        pass


@pytest.fixture
def lane() -> Lane:
    completer: Any = NoCompleter()
    return Lane(completer)


def added(lane: Lane, timeout_s: float) -> Operation:
    """An operation in flight of a group with this timeout."""
    call = Call("test", 4, lambda notify: InFlight(), lambda result: [])
    operation = Operation(lane, call, datetime.timedelta(seconds=timeout_s))
    lane.add(operation, False)
    return operation


def test_an_operation_is_given_up_after_its_timeout_while_another_thread_drives_its_lane(lane: Lane) -> None:
    """The thread that waits for it does not get to finish it, and the one that drives the lane fails it afterwards."""
    operation = added(lane, 0.05)
    with lane._driver:
        with pytest.raises(TimedOutError, match=r"after 0\.05 s, the timeout of its process group"):
            operation.wait()
        assert not operation.is_done, "only the thread that drives the lane finishes operations"
    lane.advance()
    assert operation.is_done
    with pytest.raises(TimedOutError, match=r"after 0\.05 s, the timeout of its process group"):
        operation.wait()


def test_a_wait_that_is_shorter_than_the_timeout_leaves_the_operation_in_flight(lane: Lane) -> None:
    operation = added(lane, TIMEOUT_S)
    for is_driven in (False, True):
        driven = lane._driver if is_driven else contextlib.nullcontext()
        with driven, pytest.raises(TimedOutError, match=r"after 0\.05 s, the timeout of this wait, and goes on"):
            operation.wait(datetime.timedelta(seconds=0.05))
        lane.advance()
        assert not operation.is_done


def test_a_wait_sees_what_another_thread_finishes_at_the_last_moment(lane: Lane) -> None:
    """It finishes the operation when the waiting thread has not got the lock of the lane in time."""
    operation = added(lane, TIMEOUT_S)

    class Late:
        """The lock, while the other thread holds it."""

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            operation._end()
            return False

    driver: Any = Late()
    lane._driver = driver
    assert lane.complete(operation, 0.0)
