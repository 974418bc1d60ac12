"""The states that the workers of a round have recorded, and what follows when all of them have."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from horovod.runner.elastic import constants
from horovod.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE

if TYPE_CHECKING:
    from horovod.runner.elastic.discovery import HostManager
    from horovod.runner.elastic.driver import ElasticDriver

READY = "READY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"

_log = logging.getLogger("horovod.elastic")


class WorkerStateRegistry:
    """Collects the states of a round's workers. The last one of them to record decides how the job continues.

    A worker records READY when it wants to begin the next round, SUCCESS or FAILURE when it has ended. A call that
    records a state returns when the next round has begun or the job has stopped.

    driver       -- begins the next round (`resume`), or stops the job (`stop`)
    host_manager -- excludes the hosts of workers that failed
    reset_limit  -- how many further rounds there may be; None for any number
    verbose      -- ignored
    """

    def __init__(
        self, driver: ElasticDriver, host_manager: HostManager, reset_limit: int | None = None, verbose: bool = False
    ) -> None:
        del verbose
        self._driver = driver
        self._host_manager = host_manager
        self._reset_limit = reset_limit
        self._reset_count = 0
        self._changed = threading.Condition()
        self._states: dict[tuple[str, int], str] = {}
        # The round in which a worker failed after it had recorded another state. A thread that waits may wake after
        # `_states` is cleared.
        self._overridden: dict[tuple[str, int], int] = {}
        self._size = 0
        self._round = 0
        self._decided_round = 0
        self._is_deciding = False

    def get_recorded_slots(self) -> list[tuple[str, int]]:
        """Returns host and local rank of each worker that has recorded a state."""
        with self._changed:
            return list(self._states)

    def get(self, state: str) -> set[tuple[str, int]]:
        """Returns host and local rank of each worker in a state."""
        with self._changed:
            return {slot for slot, recorded in self._states.items() if recorded == state}

    def count(self, state: str) -> int:
        """Returns the number of workers in a state."""
        return len(self.get(state))

    def total_count(self) -> int:
        """Returns the number of workers that have recorded a state."""
        return len(self.get_recorded_slots())

    def size(self) -> int:
        """Returns the number of workers of the round."""
        return self._size

    def last_rendezvous(self) -> int:
        """Returns the number of the round."""
        return self._round

    def reset(self, size: int) -> None:
        """Begins a round of this many workers, without any state."""
        with self._changed:
            self._size = size
            self._states.clear()
            self._round += 1
            self._changed.notify_all()

    def record_ready(self, host: str, slot: int) -> int:
        """Records that a worker waits for the next round. Returns the number of the round in which it did.

        Raises RuntimeError if the worker's process ends meanwhile.
        """
        return self._record(host, slot, READY)

    def record_success(self, host: str, slot: int) -> int:
        """Records that a worker has ended with status 0."""
        return self._record(host, slot, SUCCESS)

    def record_failure(self, host: str, slot: int) -> int:
        """Records that a worker has failed."""
        return self._record(host, slot, FAILURE)

    def _record(self, host: str, slot: int, state: str) -> int:
        with self._changed:
            # The states of this round are being judged, so this one belongs to the next round.
            self._changed.wait_for(lambda: not self._is_deciding)
            if self._driver.finished() or self._host_manager.is_blacklisted(host):
                return self._round
            key, own_round = (host, slot), self._round
            before = self._states.get(key, state)
            if before != state:
                if state != FAILURE:
                    raise RuntimeError(_overridden(key, state, before))
                self._overridden[key] = own_round
            self._states[key] = state
            self._changed.notify_all()
            if len(self._states) < self._size:
                return self._wait(key, state, own_round)
            self._is_deciding = True
        try:
            self._decide()
        finally:
            with self._changed:
                self._is_deciding = False
                self._decided_round = max(self._decided_round, own_round)
                self._changed.notify_all()
        return own_round

    def _wait(self, key: tuple[str, int], state: str, own_round: int) -> int:
        """Waits for the decision about a round."""

        def is_overridden() -> bool:
            return state != FAILURE and self._overridden.get(key) == own_round

        def is_over() -> bool:
            return self._decided_round >= own_round or self._driver.finished() or is_overridden()

        while not self._changed.wait_for(is_over, _POLL_S):
            pass
        if is_overridden():
            raise RuntimeError(_overridden(key, state, FAILURE))
        return own_round

    def _decide(self) -> None:
        """Decides how the job continues: all workers of the round have recorded a state."""
        _log.info("all %d workers recorded: %d failed", self._size, self.count(FAILURE))
        if self.count(SUCCESS) > 0 or self.count(FAILURE) == self._size:
            self._driver.stop()
            return
        for host, _ in self.get(FAILURE):
            self._host_manager.blacklist(host)
        if all(self._host_manager.is_blacklisted(host) for host, _ in self.get_recorded_slots()):
            _log.error("a process failed on each host")
            self._driver.stop()
            return
        if self._reset_limit is not None and self._reset_count >= self._reset_limit:
            message = constants.current("RESET_LIMIT_EXCEEDED_MESSAGE", globals())
            self._driver.stop(error_message=message.format(self._reset_limit))
            return
        try:
            self._reset_count += 1
            self._driver.resume()
        except Exception as error:
            _log.exception("the next round cannot begin")
            self._driver.stop(error_message=str(error))


def _overridden(key: tuple[str, int], state: str, by: str) -> str:
    ended = ": its process ended" if by != READY else ""
    return f"{state} of {key[0]}[{key[1]}] is overridden by {by}{ended}"


# How often to check whether the driver was stopped from outside.
_POLL_S = 0.1

__all__ = ["FAILURE", "READY", "RESET_LIMIT_EXCEEDED_MESSAGE", "SUCCESS", "WorkerStateRegistry"]
