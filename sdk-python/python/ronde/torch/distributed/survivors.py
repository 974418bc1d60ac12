"""The ranks that survive others: they begin a separate session, by handles that all have exchanged before."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import torch

from ronde import handles, reconfigure
from ronde.errors import PeerLostError, RondeError, ShutDownError
from ronde.submission import read_tensor
from ronde.tensors import source_of
from ronde.torch.distributed.progress import Lane
from ronde.torch.distributed.work import Call, InFlight, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client
    from ronde.torch.distributed.progress import Completer

_NAME = "c10d.handles"
# Ranks may make their first group at different times. The exchange is over long before it is needed.
_TIMEOUT = datetime.timedelta(minutes=30)


class Survivors:
    """The handles of all ranks of a session, which the completer's threads exchange while the program continues."""

    def __init__(self, client: Client, completer: Completer) -> None:
        self._mine = handles.own_handle()
        self._texts: list[str] = []
        source = source_of(torch.frombuffer(bytearray(self._mine.encode() + "\n", "ascii"), dtype=torch.uint8))

        def start(notify: bool) -> InFlight:
            return client._submit("allgather", source, _NAME, None, read=read_tensor(source), notify=notify)

        lane = Lane(completer)
        self._exchange = Operation(lane, Call(_NAME, source.nbytes, start, self._received), _TIMEOUT)
        self._failure: RondeError | None = None
        try:
            lane.add(self._exchange, True)
        except (PeerLostError, ShutDownError) as failure:
            # Another rank has left already. Operations report that, and a program may have none.
            self._failure = failure
        else:
            self._exchange.get_future()  # so that somebody finishes it

    def _received(self, everybodys: Any) -> list[torch.Tensor]:
        self._texts = bytes(everybodys.tolist()).decode().splitlines()
        return []

    def session(self, ranks: Sequence[int], timeout: float) -> reconfigure.Session:
        """Begins a session of these ranks, which all call this, in their order.

        timeout -- seconds to wait for them

        Raises what `ronde.reconfigure.begin` does, and RondeError if a rank was lost before all had exchanged handles.
        """
        if not self._texts:
            raise RondeError(
                f"the ranks {list(ranks)} cannot begin a session without the others, because a rank was lost before "
                f"all ranks had made their first group: {self._failure or self._exchange.exception()}",
                "connect",
            )
        texts = [self._texts[rank] for rank in ranks]
        return reconfigure.begin(reconfigure.world_of(0, texts, self._mine), timeout)
