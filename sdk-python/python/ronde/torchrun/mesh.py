"""Links between the agents of nodes that come and go: a pair of sidecars for each two nodes.

A session needs all of its ranks, so nodes that come and go have one for each pair. Its sidecar waits for the other node
for as long as it takes, and notices its death at once. All of this is over links that authenticate both sides.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING

from ronde import own_sidecar
from ronde.client import Client
from ronde.errors import RondeError
from ronde.torchrun import sidecars
from ronde.torchrun.configuration import AGENT_PORTS, Configuration
from ronde.torchrun.link import gathered
from ronde.torchrun.quorum import State, decode

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXCHANGE_INTERVAL_S = 0.1
_RETRY_S = 1.0
# An agent that has stopped does not answer, though its sidecar does.
_SILENCE_S = 15.0
_FOREVER_S = 86_000
_LEAVE_TIMEOUT_S, _STOP_TIMEOUT_S = 3.0, 15.0


class Pair:
    """This node's link to another one, which comes and goes.

    mesh  -- of this node
    other -- the number of the other node
    """

    def __init__(self, mesh: Mesh, other: int) -> None:
        self._mesh, self.other = mesh, other
        self._sidecar: own_sidecar.OwnSidecar | None = None
        self._is_stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"ronde-pair-{other}", daemon=True)

    def leave(self) -> None:
        """Begins to end the link: the other node is notified."""
        self._is_stopped.set()

    def kill(self) -> None:
        """Ends the link at once, also one that waits for the other node."""
        self._is_stopped.set()
        sidecar = self._sidecar
        if sidecar is not None and sidecar.is_running():
            sidecar.process.kill()

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            problem = "it has left"
            try:
                self._link()
            except RondeError as error:
                problem = str(error)
                if error.cause == "settings":
                    self._mesh.fail(problem)
                    return
            except ValueError as error:
                problem = f"it sent {error}; install one release of ronde on all nodes"
            self._mesh.note_lost(self.other, problem)
            self._is_stopped.wait(_RETRY_S)

    def _link(self) -> None:
        """Links to the other node when that comes, and exchanges states until one of both leaves."""
        configuration = self._mesh.pair(self.other)
        options = sidecars.agent_options(configuration, _FOREVER_S)
        deadline = time.monotonic() + _RETRY_S
        self._sidecar = sidecar = own_sidecar.start_at_ports(options, sidecars.for_agents(os.environ), deadline, True)
        try:
            if not self._is_stopped.is_set():
                self._exchange(sidecars.attached(sidecar, configuration.rank or 0, _FOREVER_S, _SILENCE_S))
        except RondeError as error:
            reason = own_sidecar.failure(sidecar, 0)
            raise RondeError(reason or str(error), "connect") from error
        finally:
            own_sidecar.stop(sidecar)

    def _exchange(self, client: Client) -> None:
        sent: State | None = None
        with client:
            while True:
                state = self._mesh.state()
                is_last = self._is_stopped.is_set() and state is sent
                # One that leaves sends its last state, then nothing.
                parts = gathered(client, b"" if is_last else state.encode(), "state", 2)
                theirs = parts[1 - client.rank]
                if theirs:
                    self._mesh.note(self.other, decode(theirs, self._mesh.count))
                if is_last or not theirs:
                    return
                sent = state
                self._mesh.pause(_EXCHANGE_INTERVAL_S)


class Mesh:
    """The links of this node to all others, and the states that it receives over them.

    configuration -- with all nodes
    me            -- the number of this node
    state         -- that it shares first
    """

    def __init__(self, configuration: Configuration, me: int, state: State) -> None:
        self._configuration, self._me = configuration, me
        self.count = configuration.size
        self._changed = threading.Condition()
        self._state = state
        self._states: dict[int, State] = {}
        self._problems = {node: "it has not connected" for node in range(self.count) if node != me}
        self._failure: str | None = None
        self._pairs = [Pair(self, node) for node in range(self.count) if node != me]
        atexit.register(self.kill)
        for pair in self._pairs:
            pair.thread.start()

    def state(self) -> State:
        """Returns what this node shares."""
        with self._changed:
            return self._state

    def share(self, state: State) -> None:
        """Shares another state."""
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def states(self) -> dict[int, State]:
        """Returns the states of the nodes that are linked, and of this one."""
        with self._changed:
            return {**self._states, self._me: self._state}

    def check(self) -> None:
        """Raises RondeError if this node's settings allow no link."""
        with self._changed:
            if self._failure is not None:
                raise RondeError(self._failure, "settings")

    def problems(self) -> Mapping[int, str]:
        """Returns, for each node that is not linked, why."""
        with self._changed:
            return {node: text for node, text in self._problems.items() if node not in self._states}

    def wait(self, timeout: float) -> None:
        """Waits for a change, or for the timeout."""
        with self._changed:
            self._changed.wait(timeout)

    def stop(self) -> None:
        """Ends all links. The other nodes receive the last state before."""
        atexit.unregister(self.kill)
        linked = set(self.states())
        for pair in self._pairs:
            if pair.other in linked:
                pair.leave()
            else:
                pair.kill()
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        for pair in self._pairs:
            pair.thread.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends all links at once."""
        atexit.unregister(self.kill)
        for pair in self._pairs:
            pair.kill()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for pair in self._pairs:
            pair.thread.join(max(0.0, deadline - time.monotonic()))

    # === For the pairs ===

    def pair(self, other: int) -> Configuration:
        """Returns the configuration of the sidecars of this node and another one."""
        low, high = sorted((self._me, other))
        run_id, whole = f"{self._configuration.run_id}/pair-{low}-{high}", self._configuration
        return whole.part(run_id, {low: AGENT_PORTS * high, high: AGENT_PORTS * low}, self._me)

    def note(self, other: int, state: State) -> None:
        """Notes the state of another node."""
        with self._changed:
            is_new = self._states.get(other) != state
            self._states[other] = state
            if is_new:
                self._changed.notify_all()

    def note_lost(self, other: int, problem: str) -> None:
        """Notes that another node is not linked any more, or not yet."""
        with self._changed:
            self._states.pop(other, None)
            self._problems[other] = problem
            self._changed.notify_all()

    def fail(self, problem: str) -> None:
        """Notes that no link can be made, because of this node's own settings."""
        with self._changed:
            self._failure = problem
            self._changed.notify_all()

    def pause(self, timeout: float) -> None:
        """Waits until this node's state changes, or for the timeout."""
        with self._changed:
            before = self._state
            self._changed.wait_for(lambda: self._state is not before, timeout)
