"""The retry loop, states and samplers in elastic jobs whose memberships are made up."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import tracked_state

from ronde.elastic import (
    HostsUpdatedInterrupt,
    HostUpdateResult,
    NotificationManager,
    ObjectState,
    RemovedFromJob,
    StateLostError,
    is_elastic,
    loop,
    membership,
    notification_manager,
    run_fn,
)
from ronde.errors import MismatchError, PeerLostError, RondeError, ShutDownError, TimedOutError

LOST = PeerLostError("rank 1 on host a exited with code 1", "rank_lost", 1)
REMOVED = RondeError("worker 3 has been removed from elastic job; its process can exit", "claim")


@pytest.fixture(autouse=True)
def _elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_ELASTIC", "1")


class Tracked(tracked_state.Tracked):
    """A state that also records what the ranks agree on."""

    def agree_on_state(self, has_state: bool) -> bool:
        return has_state

    def agree_on_sync(self, needed: bool) -> bool:
        self.log.append(f"agree {needed}")
        return super().agree_on_sync(needed)

    def wait_for_all(self) -> None:
        self.log.append("wait")
        super().wait_for_all()


class Scripted:
    """Raises one thing after the other, then returns."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)

    def __call__(self, *_: Any) -> Any:
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def test_whether_a_job_is_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_elastic()
    monkeypatch.setenv("RONDE_ELASTIC", "0")
    assert not is_elastic()
    monkeypatch.delenv("RONDE_ELASTIC")
    assert not is_elastic()


# === The loop ===


def test_a_lost_rank_restores_the_last_commit() -> None:
    state, seen = Tracked(batch=0), []

    def train(state: Any) -> str:
        seen.append(state.batch)
        if len(seen) == 1:
            state.batch = 2
            state.commit()
            state.batch = 3
            raise LOST
        return "trained"

    assert run_fn(train, lambda: state.log.append("restart"))(state) == "trained"
    assert seen == [0, 2]
    expected = ["agree True", "sync", "save", "restore", "restart", "reset", "agree True", "sync", "wait"]
    assert state.log == expected


def test_a_rank_lost_during_the_restart_is_another_restart() -> None:
    restarts = Scripted(LOST, ShutDownError("a rank left"), None)
    assert run_fn(Scripted(LOST, "trained"), restarts)(Tracked()) == "trained"
    assert restarts.outcomes == []


@pytest.mark.parametrize("failure", [LOST, ShutDownError("a rank left")])
def test_restarts_without_a_commit_are_limited(failure: RondeError) -> None:
    restarts = Scripted(*[failure] * 100)
    with pytest.raises(RondeError, match=re.escape(str(failure))):
        run_fn(Scripted(LOST), restarts)(Tracked())
    assert len(restarts.outcomes) == 100 - loop.RESETS_MAX


def test_a_membership_that_does_not_come_raises_the_failure() -> None:
    restart = Scripted(TimedOutError("no membership within 600 s", "start"))
    with pytest.raises(PeerLostError, match="rank 1 on host a") as caught:
        run_fn(Scripted(LOST), restart)(Tracked())
    assert isinstance(caught.value.__cause__, TimedOutError)


@pytest.mark.parametrize("reason", [LOST, HostsUpdatedInterrupt()])
def test_a_removed_worker_ends_with_status_0(reason: Exception) -> None:
    with pytest.raises(RemovedFromJob) as caught:
        run_fn(Scripted(reason), Scripted(REMOVED))(Tracked())
    assert caught.value.code == 0


def test_a_callback_may_lose_a_rank_too() -> None:
    state = Tracked()
    state.register_reset_callbacks([Scripted(LOST, None)])
    assert run_fn(Scripted(MismatchError("differs"), "trained"), Scripted())(state) == "trained"
    assert state.log.count("restore") == 2


def test_the_end_waits_for_all_ranks() -> None:
    """Another rank may have failed meanwhile: then all of them make the last steps again."""
    state = Tracked()
    state._bcast_object = Scripted(LOST, None)  # type: ignore[assignment]
    calls: list[int] = []
    assert run_fn(lambda state: calls.append(1), Scripted())(state) is None
    assert len(calls) == 2
    state._bcast_object = Scripted(ShutDownError("rank 1 has ended its session"))  # type: ignore[assignment]
    assert run_fn(lambda state: "trained", Scripted())(state) == "trained"


def test_training_without_a_commit_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    run_fn(Scripted(LOST, "trained"), Scripted())(Tracked())
    assert "the state has no commit, so training restarts from its last synchronization" in caplog.text
    caplog.clear()
    state = Tracked()
    state.commit()
    run_fn(Scripted(LOST, "trained"), Scripted())(state)
    assert "no commit" not in caplog.text


def test_an_interrupt_synchronizes_if_a_rank_needs_it() -> None:
    """A new worker may have come in addition, so all ranks are asked, also where workers were only removed."""
    state = Tracked()
    run_fn(Scripted(HostsUpdatedInterrupt(skip_sync=True), None), Scripted())(state)
    assert state.log == ["agree True", "sync", "reset", "agree False", "sync", "wait"]


# === Changes of the membership ===


def test_an_announced_change_interrupts_at_the_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = Scripted(None, (4, 0, 1))
    notification_manager.follow(changes)
    state, steps = Tracked(), []

    def train(state: Any) -> None:
        while len(steps) < 3:
            steps.append(1)
            state.check_host_updates()

    try:
        run_fn(train, lambda: state.log.append("restart"))(state)
    finally:
        notification_manager.follow(None)
    # The wait after the interrupt makes sure that all ranks have received it.
    assert state.log == ["agree True", "sync", "wait", "restart", "reset", "agree False", "sync", "wait"]


@pytest.mark.parametrize(
    ("added", "removed", "expected"),
    [
        (1, 0, HostUpdateResult.added),
        (0, 2, HostUpdateResult.removed),
        (1, 1, HostUpdateResult.mixed),
        (0, 0, HostUpdateResult.no_update),
    ],
)
def test_a_change_as_horovods_result(added: int, removed: int, expected: int) -> None:
    manager, state = NotificationManager(), Tracked()
    manager.register_listener(state)
    manager.poll()
    manager.follow(Scripted((2, added, removed)))
    manager.poll()
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync is (expected == HostUpdateResult.removed)
    manager.poll()
    state.check_host_updates()


def test_an_interrupt_survives_a_rank_that_leaves_at_once() -> None:
    state = Tracked()
    answers = Scripted((0.0, 5.0, HostUpdateResult.added), ShutDownError("rank 0 left"))
    state._bcast_object = answers  # type: ignore[assignment]
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


class Replaying(Tracked):
    """A state whose session replays operations, and whose other ranks have received nothing."""

    def _replays_operations(self) -> bool:
        return True


def test_a_replay_calls_the_function_again_in_the_session_that_there_is() -> None:
    state, steps = Replaying(), []

    def train(state: Any) -> None:
        while len(steps) < 4:
            steps.append(1)
            if len(steps) == 2:
                notification_manager.note_replay()
            state.check_host_updates()

    run_fn(train, lambda: state.log.append("restart"))(state)
    assert state.log == ["agree True", "sync", "reset", "agree False", "sync", "wait"]
    assert len(steps) == 4


@pytest.mark.parametrize(("added", "skips"), [(1, False), (0, True)])
def test_changed_hosts_restart_the_session_after_a_replay_too(added: int, skips: bool) -> None:
    state = Replaying()
    notification_manager.note_replay()
    state.on_hosts_updated(5.0, HostUpdateResult.added if added else HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert (caught.value.skip_sync, caught.value.keeps_session) == (skips, False)
    state.on_reset()
    state.check_host_updates()


# === Waiting for a membership ===


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(membership.time, "sleep", lambda seconds: setattr(made, "now", made.now + seconds))
    return made


def test_connecting_waits_for_a_membership(clock: Clock) -> None:
    connect = Scripted(LOST, ShutDownError("ended"), TimedOutError("rank 2 has not attached", "start"), "session")
    assert membership.connected(connect, clock) == "session"
    assert 0 < clock.now < 1


def test_connecting_ends_with_the_elastic_timeout(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_START_TIMEOUT", "60")
    connect = Scripted(*[LOST] * 1000)
    with pytest.raises(PeerLostError):
        membership.connected(connect, clock)
    assert 80 < clock.now <= 60 + 30


@pytest.mark.parametrize("error", [REMOVED, RondeError("no sidecar answers", "connect"), MismatchError("differs")])
def test_other_failures_to_connect_are_raised(clock: Clock, error: RondeError) -> None:
    with pytest.raises(RondeError, match=re.escape(str(error))):
        membership.connected(Scripted(error), clock)
    assert clock.now == 0


def test_a_fixed_job_connects_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RONDE_ELASTIC")
    with pytest.raises(PeerLostError):
        membership.connected(Scripted(LOST, "session"), clock)


def test_the_elastic_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RONDE_START_TIMEOUT", raising=False)
    assert membership.timeout_s() == 630
    monkeypatch.setenv("RONDE_START_TIMEOUT", "20")
    assert membership.timeout_s() == 50
    monkeypatch.setenv("RONDE_START_TIMEOUT", "never")
    with pytest.raises(ValueError, match="RONDE_START_TIMEOUT is 'never'; give a number of seconds above 0"):
        membership.timeout_s()


# === States that cannot be sent ===


def pickling(root_rank: int, received: list[Any]) -> Callable[[Any], Any]:
    """A broadcast as of rank 0, or as of another rank, which receives what rank 0 sent."""
    pickle = pytest.importorskip("cloudpickle")

    def broadcast(value: Any) -> Any:
        if root_rank == 0:
            received.append(pickle.dumps(value))
            return value
        return pickle.loads(received.pop(0))

    return broadcast


def test_an_attribute_that_cannot_be_pickled_is_named_on_all_ranks() -> None:
    sent: list[Any] = []
    for rank in (0, 1):
        values = {"epoch": 1, "loader": (number for number in range(3))}
        state = ObjectState(pickling(rank, sent), lambda rank=rank: rank, **values)  # type: ignore[misc]
        with pytest.raises(ValueError, match="the attribute loader of the state cannot be sent") as caught:
            state.sync()
        assert "TypeError" in str(caught.value)
        assert "create the generator from it in a reset callback" in str(caught.value)
    assert sent == []


def test_other_failures_of_a_broadcast_are_raised_as_they_are() -> None:
    for error in (LOST, OSError("disk")):
        state = ObjectState(Scripted(error), lambda: 0, epoch=1)
        with pytest.raises(type(error), match=re.escape(str(error))):
            state.sync()


def test_new_workers_without_the_state_do_not_train_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers that had the state are gone, so rank 0 is a new one."""
    monkeypatch.setenv("RONDE_NEW_WORKER", "1")
    state = Tracked(step=0)
    train = Scripted()
    with pytest.raises(StateLostError, match="start the job again from a checkpoint"):
        run_fn(train, lambda: None)(state)
    assert state.log == []


def test_a_new_worker_has_the_state_after_it_was_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_NEW_WORKER", "1")
    flags: list[bool] = []

    class Younger(Tracked):
        """A state whose rank 0 is another worker."""

        def agree_on_state(self, has_state: bool) -> bool:
            flags.append(has_state)
            return True

    run_fn(Scripted(PeerLostError("rank 1 is gone")), lambda: None)(Younger(step=0))
    assert flags == [False, True]
