"""The rendezvous of nodes that come and go: `torchrun --rdzv-backend ronde --nnodes MIN:MAX`.

The agents are linked in pairs (`mesh`) and agree on rounds (`quorum`). A round begins when all of its members have met
in a session of their agents, which is the same as for a fixed number of nodes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from typing import Callable

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.logging import get_logger

from ronde import _ronde
from ronde.errors import RondeError
from ronde.private_folder import DirectoryStore, own_base
from ronde.torchrun import sidecars
from ronde.torchrun.configuration import PORTS_OF_PAIRS, PORTS_OF_ROUND, ROUNDS, Configuration
from ronde.torchrun.handler import Handler, Hello, attempt, named
from ronde.torchrun.link import Link, until
from ronde.torchrun.mesh import Mesh
from ronde.torchrun.quorum import Enter, Proposal, Propose, Round, State, decide, decode, newest, objection

_POLL_INTERVAL_S = 0.5
# Members of a proposal are there; one that dies meanwhile makes the others try again.
_ENTER_TIMEOUT_S = 30.0
_ROUND = "round"
_REMOVE = "remove the directory ronde-rounds-* below XDG_RUNTIME_DIR or TMPDIR, or give another --rdzv-id"
_logger = get_logger(__name__)


class RoundsHandler(Handler):
    """The rendezvous handler of an agent whose job has nodes that come and go."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        assert configuration.nodes_min is not None  # see `handler.create`
        self._nodes_min, self._count = configuration.nodes_min, configuration.size
        self._me = -1
        self._mesh: Mesh | None = None
        self._memory: Memory | None = None
        self._failed: set[str] = set()

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes wait for a round: new ones, and members that begin again or have been lost."""
        if self._mesh is None or self._link is None:
            return 0
        if self._link.is_over():
            return 1
        states = self._mesh.states()
        return sum(state.waits and self._fits(state) for node, state in states.items() if node != self._me)

    def set_closed(self) -> None:
        """Leaves the job: agents do not meet again, and those that wait end."""
        super().set_closed()
        self._share(waits=False, proposal=None)

    def shutdown(self) -> bool:
        """Leaves the job and stops the sidecars."""
        super().shutdown()
        if self._memory is not None:
            self._memory.remove()
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.stop()
        return True

    # === The next round ===

    def _met(self) -> tuple[Link, int, Hello]:
        deadline = time.monotonic() + self._configuration.timeout
        mesh = self._started()
        self._share(waits=True, proposal=None)
        reported, ready_since = "", None
        while True:
            states = self._states(mesh)
            now = time.monotonic()
            ready_since = (ready_since or now) if self._is_ready(states) else None
            is_last_call = ready_since is not None and now - ready_since >= self._configuration.last_call
            decision = decide(self._me, states, self._nodes_min, self._count, is_last_call, self._failed)
            if isinstance(decision, (Propose, Enter)):
                met = self._entered(self._proposal(decision, states), deadline)
                if met is not None:
                    return met
            else:
                text = f"{decision.reason}{self._absent(mesh)}"
                if text != reported:
                    _logger.warning("the agents wait for the next round: %s", text)
                    reported = text
            if not until(deadline):
                raise RendezvousTimeoutError(self._late(states, reported))
            mesh.wait(min(_POLL_INTERVAL_S, until(deadline)))

    def _started(self) -> Mesh:
        if self._mesh is None:
            try:
                rank = self._configuration.rank
                self._me = sidecars.own_rank(self._configuration) if rank is None else rank
            except RondeError as error:
                raise RendezvousConnectionError(str(error)) from error
            self._memory = Memory(self._configuration, self._me)
            first = State(self._options(), True, Round(0, tuple(range(self._count))))
            self._mesh = Mesh(self._configuration, self._me, self._memory.read(first))
        return self._mesh

    def _options(self) -> tuple[tuple[str, str], ...]:
        endpoint = ",".join(map(str, self._configuration.nodes))
        return (
            ("release of ronde", _ronde.__version__),
            ("--rdzv-endpoint", endpoint),
            ("--nnodes", f"{self._nodes_min}:{self._count}"),
        )

    def _share(self, change: Callable[[State], State] = lambda state: state, **changes: object) -> None:
        """Changes what this node shares, and what it remembers: also the newest round that it knows of others.

        change  -- of rounds
        changes -- of other fields
        """
        if self._mesh is None:
            return
        before = mine = self._mesh.state()
        known = [state for state in self._mesh.states().values() if self._fits(state)]
        for state in known:
            mine = mine.committing(state.committed)
        changes.setdefault("attempt", max(state.attempt for state in known))
        mine = change(mine._replace(closed=self._closed or "", **changes))  # type: ignore[arg-type]
        if self._memory is not None and (mine.committed, mine.noted) != (before.committed, before.noted):
            self._memory.write(mine)
        self._mesh.share(mine)

    def _fits(self, state: State) -> bool:
        return state.options == self._options()

    def _states(self, mesh: Mesh) -> dict[int, State]:
        """Returns the states of all nodes that are linked.

        Raises RendezvousStateError if they have other options, RendezvousClosedError if the job is over, and
        RendezvousConnectionError if this node cannot be linked to any.
        """
        try:
            mesh.check()
        except RondeError as error:
            raise RendezvousConnectionError(str(error)) from error
        states = mesh.states()
        for node, state in states.items():
            for (what, theirs), (_, mine) in zip(state.options, self._options()):
                if theirs != mine:
                    raise RendezvousStateError(
                        f"{what} is {theirs!r} on node {node} ({self._configuration.nodes[node]}), but {mine!r} here; "
                        "give all nodes the same"
                    )
            if state.closed:
                where = self._configuration.nodes[node]
                self._closed = f"the job is over, as node {node} ({where}) knows: {state.closed}"
                raise RendezvousClosedError(self._closed)
        return states

    def _is_ready(self, states: dict[int, State]) -> bool:
        waiting = [node for node, state in states.items() if state.waits]
        return objection(waiting, newest(states.values()), self._nodes_min) is None

    def _proposal(self, decision: Propose | Enter, states: dict[int, State]) -> Proposal:
        if isinstance(decision, Enter):
            return decision.proposal
        number = newest(states.values())[-1].number + 1
        attempts = max(state.attempt for state in states.values()) + 1
        proposal = Proposal(Round(number, decision.members), attempts, secrets.token_hex(8))
        self._share(proposal=proposal, attempt=attempts)
        return proposal

    def _entered(self, proposal: Proposal, deadline: float) -> tuple[Link, int, Hello] | None:
        """Meets the other members of a proposal, which begins the round. Returns None if they do not meet."""
        members = proposal.round.members
        offset = PORTS_OF_PAIRS + PORTS_OF_ROUND * (proposal.attempt % ROUNDS)
        # Names that only this proposal's members have: nobody else can be admitted to their session.
        run_id = f"{self._configuration.run_id}/round-{proposal.round.number}-{proposal.ballot}"
        self._share(lambda state: state.noting(proposal.round))
        self._round = self._configuration.part(run_id, dict.fromkeys(members, offset), self._me)
        try:
            timeout = min(until(deadline), _ENTER_TIMEOUT_S)
            met = attempt(self._round, self._hello(), time.monotonic() + timeout)
        except RondeError as error:
            _logger.warning("the members of round %d have not met: %s", proposal.round.number, self._named(error))
            self._failed.add(proposal.ballot)
            self._share(proposal=None, attempt=max(proposal.attempt, self._attempt_known()))
            return None
        self._share(lambda state: state.committing(proposal.round), waits=False, proposal=None)
        return met

    def _attempt_known(self) -> int:
        return 0 if self._mesh is None else self._mesh.state().attempt

    def _named(self, error: RondeError) -> str:
        return named(str(error), self._round.nodes)

    # === Messages ===

    def _absent(self, mesh: Mesh) -> str:
        """Returns the nodes that are not linked, with the reasons, for a message."""
        absent = [
            f"node {node} ({self._configuration.nodes[node]}): {named(text.splitlines()[0], mesh.pair(node).nodes)}"
            for node, text in sorted(mesh.problems().items())
        ]
        return f". Not linked: {'; '.join(absent)}" if absent else ""

    def _late(self, states: dict[int, State], reason: str) -> str:
        waiting = sum(state.waits for state in states.values())
        return (
            f"no round has begun within {self._configuration.timeout:.0f} s; {waiting} of at least {self._nodes_min} "
            f"nodes wait for it: {reason}. Start torchrun on more nodes, with the same options; if they only need more "
            "time, give --rdzv-conf timeout=SECONDS"
        )


class Memory:
    """The newest rounds that this node knows, in a private file, for its next agent.

    Without it, agents that are started again would be nodes that have never begun, which may begin a first round.
    """

    def __init__(self, configuration: Configuration, me: int) -> None:
        self._count = configuration.size
        key = "\n".join([configuration.run_id, *map(str, configuration.nodes), str(me)])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        self._store = DirectoryStore(own_base() / f"ronde-rounds-{os.getuid()}-{digest}")

    def read(self, first: State) -> State:
        """Returns the first state of this agent, with what the node remembers. Raises RendezvousStateError."""
        try:
            found = decode(self._store.get(_ROUND), self._count)
        except FileNotFoundError:
            return first
        except (ValueError, RondeError) as error:
            raise RendezvousStateError(f"what this node remembers cannot be used: {error}; {_REMOVE}") from error
        return first._replace(committed=found.committed, noted=found.noted)

    def write(self, state: State) -> None:
        """Writes the rounds. Raises RondeError."""
        self._store.set(_ROUND, state.encode())

    def remove(self) -> None:
        """Removes the file, when the job is over."""
        self._store.remove()
