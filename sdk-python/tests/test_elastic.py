"""States, and the retry loop that restores them, without a job."""

from __future__ import annotations

from typing import Any, Callable
from unittest import mock

import pytest
from tracked_state import Tracked

from ronde.elastic import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State, run_fn
from ronde.elastic.loop import RESETS_MAX
from ronde.errors import MismatchError, PeerLostError, RondeError, TimedOutError
from ronde.frameworks.keras.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback


def run(function: Callable[[Tracked], Any], state: Tracked, reset: Callable[[], None] | None = None) -> Any:
    return run_fn(function, reset or (lambda: state.log.append("restart")))(state)


def test_an_object_state_saves_and_restores() -> None:
    state = Tracked(epoch=0, best=None)
    state.epoch, state.best = 3, 0.5
    state.commit()
    assert state.commits == 1
    state.epoch, state.other = 4, "not part of it"
    state.restore()
    assert (state.epoch, state.best, state.other) == (3, 0.5, "not part of it")


def test_sync_broadcasts_the_current_state_of_rank_0() -> None:
    """Also what was set since the state was made, such as by a checkpoint."""
    sent: list[Any] = []

    def broadcast(value: Any) -> Any:
        sent.append(value)
        return {**value, "epoch": 7}

    state = ObjectState(broadcast, lambda: 1, epoch=0, batch=0)
    state.batch = 5
    state.sync()
    assert sent == [{"epoch": 0, "batch": 5}]
    assert (state.epoch, state.batch) == (7, 5)
    state.epoch = 9
    state.restore()
    assert state.epoch == 7
    ObjectState(pytest.fail, lambda: 0).sync()


def test_a_failed_collective_restores_the_last_commit() -> None:
    state = Tracked(batch=0)
    state.register_reset_callbacks([lambda: state.log.append("first")])
    state.register_reset_callbacks([lambda: state.log.append("second")])
    seen = []

    def train(state: Any) -> str:
        seen.append(state.batch)
        if len(seen) == 1:
            state.batch = 2
            state.commit()
            state.batch = 3
            raise MismatchError("shapes differ", "mismatch")
        return "trained"

    assert run(train, state) == "trained"
    assert seen == [0, 2]
    assert state.log == ["sync", "save", "restore", "restart", "reset", "first", "second", "sync"]


@pytest.mark.parametrize(
    ("changes", "syncs_again"),
    [
        ([HostUpdateResult.removed], False),
        ([HostUpdateResult.added], True),
        ([HostUpdateResult.removed, HostUpdateResult.added], True),
    ],
)
def test_changed_hosts_keep_the_state(changes: list[int], syncs_again: bool) -> None:
    state = Tracked(batch=0)
    seen = []

    def train(state: Any) -> int:
        seen.append(state.batch)
        state.batch += 1
        if len(seen) == 1:
            for time, change in enumerate(changes, 1):
                state.on_hosts_updated(time, change)
        state.check_host_updates()
        return state.batch

    assert run(train, state) == 2
    assert seen == [0, 1]
    assert state.log == ["sync", "restart", "reset", *["sync"] * syncs_again]


def test_old_host_updates_are_ignored() -> None:
    state = Tracked()
    state.on_hosts_updated(2.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is False
    state.on_hosts_updated(1.0, HostUpdateResult.removed)
    state.commit()
    state.on_hosts_updated(3.0, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync is True
    state.on_hosts_updated(4.0, HostUpdateResult.removed)
    state.on_reset()
    state.check_host_updates()


def test_an_earlier_clock_than_that_of_a_former_rank_0_hides_no_changes() -> None:
    """All ranks take the time of a change from rank 0, which another host has after a loss."""
    ahead = 1e9
    state = Tracked()
    state._bcast_object = lambda _: (0.0, ahead, HostUpdateResult.added)  # type: ignore[assignment]
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.on_reset()
    state._bcast_object = lambda value: value
    state.on_hosts_updated(ahead - 60, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is True


def test_a_host_update_on_rank_0_interrupts_all_ranks() -> None:
    state = State(lambda _: (0.0, 5.0, HostUpdateResult.removed), lambda: 1)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync is True
    for unfinished in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError):
            unfinished()


def test_a_lost_rank_is_not_retried() -> None:
    state = Tracked()

    def train(_: Any) -> None:
        raise PeerLostError("rank 1 on host a exited with code 1", "rank_lost", 1)

    with pytest.raises(PeerLostError, match="rank 1 on host a"):
        run(train, state)
    assert state.log == ["sync"]


def test_the_first_failure_is_raised_when_the_session_cannot_restart() -> None:
    def train(_: Any) -> None:
        raise MismatchError("shapes differ")

    def reset() -> None:
        raise TimedOutError("rank 1 has not joined")

    with pytest.raises(MismatchError, match="shapes differ") as caught:
        run(train, Tracked(), reset)
    assert isinstance(caught.value.__cause__, TimedOutError)

    def interrupted(_: Any) -> None:
        raise HostsUpdatedInterrupt

    with pytest.raises(TimedOutError):
        run(interrupted, Tracked(), reset)


def test_repeated_failures_without_a_commit_are_raised() -> None:
    calls, commits_until = [], RESETS_MAX + 5

    def train(state: Any) -> None:
        calls.append(1)
        if len(calls) <= commits_until:
            state.commit()
        raise RondeError(f"failure {len(calls)}")

    with pytest.raises(RondeError, match=f"failure {commits_until + RESETS_MAX}"):
        run(train, Tracked())


def test_other_exceptions_of_the_function_propagate() -> None:
    def train(_: Any) -> None:
        raise KeyError("loss")

    with pytest.raises(KeyError, match="loss"):
        run(train, Tracked())


def test_the_loop_calls_a_state_as_horovods_does() -> None:
    """Synchronization is left out after hosts were only removed, and the state is reset before it."""
    state, outcomes = mock.Mock(), [RondeError(), HostsUpdatedInterrupt(True), HostsUpdatedInterrupt(False)]

    def train(state: Any, step: int, scale: int) -> int:
        if outcomes:
            raise outcomes.pop(0)
        return step * scale

    state.reset_session = mock.Mock()
    assert run_fn(train, state.reset_session)(state, 2, scale=3) == 6
    called = [call[0] for call in state.method_calls]
    again = ["reset_session", "on_reset"]
    assert called == ["sync", "restore", *again, "sync", *again, *again, "sync"]


def test_batches_of_an_epoch_that_a_second_fit_continues_are_counted() -> None:
    """Keras counts the batches of each `fit` from 0; the epochs after the first one are whole."""
    state = mock.Mock(batch=3)
    callback = UpdateBatchStateCallback(state, state.batch)
    for _ in range(2):  # calls of `fit`
        callback.on_train_begin()
        callback.on_train_batch_end(0)
        callback.on_train_batch_end(1)
        assert state.batch == 5
        callback.on_epoch_end(0)
        assert state.batch == 0
        callback.on_train_batch_end(0)
        assert state.batch == 1
    callback = UpdateBatchStateCallback(state)
    callback.on_train_begin()
    callback.on_train_batch_end(1)
    assert state.batch == 2


@pytest.mark.parametrize("numbers_all", [True, False])
def test_epochs_are_counted_with_and_without_the_number_of_the_first_one(numbers_all: bool) -> None:
    """`fit` numbers epochs from `initial_epoch`, or from 0 as in programs for Horovod. Each one is interrupted."""
    state = mock.Mock(epoch=0)
    callback, counted = UpdateEpochStateCallback(state), []
    for epochs in (2, 1, 3):  # complete ones of each `fit`
        first = state.epoch if numbers_all else 0
        callback.on_train_begin()
        for epoch in range(first, first + epochs):
            callback.on_epoch_begin(epoch)
            callback.on_epoch_end(epoch)
            counted.append(state.epoch)
        callback.on_epoch_begin(first + epochs)
    assert counted == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("calls", "every", "expected"),
    [
        ([0, 1, 2, 3, 4, 0, 1, 2, 3, 4], 3, [2, 0, 3]),
        # With `steps_per_execution=4`, an epoch of ten batches has the calls 3, 7, 9.
        ([3, 7, 9, 3, 7, 9], 5, [7, 3, 9]),
        ([3, 7, 9, 3, 7, 9], 1, [3, 7, 9, 3, 7, 9]),
        ([9, 9, 9], 20, [9]),
        ([0, 1, 2], 0, []),
    ],
)
def test_a_commit_follows_a_number_of_batches(calls: list[int], every: int, expected: list[int]) -> None:
    """Keras names the last batch that is complete. Batches count across epochs."""
    state = mock.Mock()
    callback, found = CommitStateCallback(state, every), []
    callback.on_train_begin()
    for batch in calls:
        before = state.commit.call_count
        callback.on_train_batch_end(batch)
        found += [batch] * (state.commit.call_count - before)
    assert found == expected
    # A further `fit` starts to count again.
    state.commit.reset_mock()
    callback.on_train_begin()
    callback.on_train_batch_end(0)
    assert state.commit.call_count == (every == 1)
