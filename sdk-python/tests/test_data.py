"""Loaders that prefetch."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from ronde.data import AsyncDataLoaderMixin, BaseDataLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 30


class Squares(BaseDataLoader):
    """A loader of numbers, which `_process_batch` squares."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.read: list[int] = []
        self.readers: set[str] = set()
        self.users: set[str] = set()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.fails_at:
                raise OSError("the disk is gone")
            self.readers.add(threading.current_thread().name)
            self.read.append(number)
            yield number

    def _process_batch(self, batch: int) -> int:
        self.users.add(threading.current_thread().name)
        return batch * batch


class AsyncSquares(AsyncDataLoaderMixin, Squares):
    pass


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ronde-data-reader"]


@pytest.fixture(autouse=True)
def no_reader_is_left() -> Iterator[None]:
    yield
    for thread in reader_threads():
        thread.join(TIMEOUT_S)
    assert not reader_threads()


@pytest.mark.parametrize("size", [0, 1, 2, 64])
def test_batches_come_in_order_in_every_pass(size: int) -> None:
    loader = AsyncSquares(size, False, 5)
    expected = [0, 1, 4, 9, 16]
    assert [list(loader), list(loader)] == [expected, expected]
    assert len(loader) == 5
    me = threading.current_thread().name
    assert loader.users == {me}
    assert loader.readers == ({me} if size == 0 else {"ronde-data-reader"})


def test_without_the_mixin_nothing_reads_ahead() -> None:
    loader = Squares(3)
    assert next(iter(loader)) == 0
    assert loader.read == [0]
    with pytest.raises(TypeError, match="abstract"):
        BaseDataLoader()  # type: ignore[abstract]


@pytest.mark.parametrize("size", [0, 3])
def test_an_error_is_raised_after_the_batches_before_it(size: int) -> None:
    loader = AsyncSquares(async_loader_queue_size=size, count=5, fails_at=2)
    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(loader)
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(loader)
    assert seen == [0, 1, 0, 1]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_leaving_a_pass_early_ends_its_reader(size: int) -> None:
    loader = AsyncSquares(size, count=50)
    pass_ = iter(loader)
    assert next(pass_) == 0
    pass_.close()  # type: ignore[attr-defined]
    assert not reader_threads()
    assert len(loader.read) <= size + 3
    assert list(loader) == [number * number for number in range(50)]


def test_it_reads_ahead_at_most_its_queue_size() -> None:
    started, wanted = threading.Semaphore(0), threading.Event()

    class Slow(Squares):
        def _iterate(self) -> Iterator[int]:
            for number in super()._iterate():
                started.release()
                yield number
            wanted.set()

    class Ahead(AsyncDataLoaderMixin, Slow):
        pass

    loader = Ahead(2, count=100)
    pass_ = iter(loader)
    next(pass_)
    # One is used, two wait in the queue, one is in the reader's hand.
    for _ in range(4):
        assert started.acquire(timeout=TIMEOUT_S)
    assert len(loader.read) == 4
    assert not wanted.is_set()
    loader.close_async_loader()
    assert list(pass_) == []
    loader.close_async_loader()


def test_closing_ends_an_iteration_that_waits() -> None:
    inside, go, is_used = threading.Event(), threading.Event(), threading.Event()

    class Stuck(Squares):
        def _iterate(self) -> Iterator[int]:
            yield 0
            inside.set()
            go.wait(TIMEOUT_S)

    class Waiting(AsyncDataLoaderMixin, Stuck):
        pass

    loader = Waiting(4, count=2)
    seen: list[int] = []

    def use() -> None:
        for batch in loader:
            seen.append(batch)
            is_used.set()

    user = threading.Thread(target=use)
    user.start()
    assert inside.wait(TIMEOUT_S)
    assert is_used.wait(TIMEOUT_S)
    closer = threading.Thread(target=loader.close_async_loader)
    closer.start()
    go.set()
    for thread in (closer, user):
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    assert seen == [0]


def test_a_pass_may_begin_while_others_are_closed() -> None:
    """In another thread, which adds its reader while this one iterates over those that there are."""
    loader = AsyncSquares(2, count=100)
    passes = [iter(loader), iter(loader)]
    assert [next(each) for each in passes] == [0, 0]
    begun: list[int] = []
    other = threading.Thread(target=lambda: begun.append(next(iter(loader))))

    class Readers(weakref.WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            for reader in super().__iter__():
                if other.ident is None:
                    other.start()
                    other.join(0.5)  # it has added its reader by then, or it waits for the end of the iteration
                yield reader

    loader._readers = Readers(loader._readers)
    loader.close_async_loader()
    other.join(TIMEOUT_S)
    assert begun == [0]
    assert [list(each) for each in passes] == [[], []]


def test_a_reader_that_reads_when_its_pass_is_left_ends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes the end of the pass from the queue, which has no room for a batch then."""
    monkeypatch.setattr("ronde.data.loader.CLOSE_TIMEOUT_S", 0.1)
    go = threading.Event()

    class Slow(Squares):
        def _iterate(self) -> Iterator[int]:
            yield 0
            go.wait(TIMEOUT_S)
            yield 1

    class Ahead(AsyncDataLoaderMixin, Slow):
        pass

    for batch in Ahead(1, count=2):
        assert batch == 0
        break
    assert reader_threads()
    go.set()
    for thread in reader_threads():
        thread.join(TIMEOUT_S)
    assert not reader_threads()


def test_options_of_the_mixin(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        AsyncSquares(-1, count=1)
    with caplog.at_level(logging.INFO, "ronde.data"):
        assert list(AsyncSquares(2, debug_data_loader=True, count=1)) == [0]
    assert "waited" in caplog.text


def test_a_custom_loader_needs_no_base_class() -> None:
    class Mine(AsyncDataLoaderMixin):
        def _iterate(self) -> Iterator[str]:
            yield "a"

        def _process_batch(self, batch: Any) -> Any:
            return batch * 2

    assert list(Mine()) == ["aa"]
