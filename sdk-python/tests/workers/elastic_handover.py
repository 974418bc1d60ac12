"""Run by every rank: a state that is handed over to ranks that lack it, by several that have it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from typing import TYPE_CHECKING, Any

import torch

import ronde.torch as hvd
from ronde.torch.elastic import chunks, handover

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of a layer whose weight has more than one chunk.
WIDTH = 1500


class Messages(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def recorded() -> Iterator[tuple[list[handover.Stream], list[str]]]:
    """Records the streams of the hand-overs within, and what they log."""
    made: list[handover.Stream] = []
    original, messages = handover.streams_of, Messages()

    def streams_of(*arguments: Any) -> list[handover.Stream]:
        made.extend(original(*arguments))
        return list(made)

    handover.streams_of = streams_of
    logging.getLogger("ronde.elastic").addHandler(messages)
    try:
        yield made, messages.texts
    finally:
        handover.streams_of = original
        logging.getLogger("ronde.elastic").removeHandler(messages)


def trained(model: Any, optimizer: Any) -> None:
    """Makes a step that is the same on all ranks."""
    optimizer.zero_grad()
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    optimizer.step()


def digest(state: Any) -> str:
    """Returns the digest of model and optimizer."""
    made = hashlib.sha256()
    values = [each for kept in state.optimizer.state.values() for each in kept.values()]
    for each in [*state.model.state_dict().values(), *values]:
        made.update(each.contiguous().numpy().tobytes())
    return made.hexdigest()


def check_equal(state: Any, sent: set[int]) -> None:
    """Checks that all ranks have the same state, and which ranks have sent it."""
    everybodys = hvd.allgather_object([digest(state), state.step, sorted(sent)])
    assert all(each == everybodys[0] for each in everybodys), everybodys


def made_state() -> Any:
    """Returns a state of several chunks whose numbers differ between ranks, with tensors that are not contiguous."""
    torch.manual_seed(hvd.rank())
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten(), torch.nn.Linear(32, WIDTH)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WIDTH)).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, optimizer)
    return hvd.elastic.TorchState(model, optimizer, step=hvd.rank())


def forget(state: Any) -> None:
    """Makes this rank one that has just come."""
    state._is_synced = False
    for each in state.model.state_dict().values():
        each.zero_()
    state.optimizer.state.clear()
    state.step = -1


def at_the_start(state: Any) -> None:
    """Rank 0 sends to all others."""
    with recorded() as (streams, logged):
        state.sync()
    assert [(each.source, each.ranks) for each in streams] == [(0, tuple(range(hvd.size())))], streams
    assert state.step == 0
    assert logged == []
    check_equal(state, {0})


def nobody_is_new(state: Any) -> None:
    """The digests are equal, so nothing is sent."""
    trained(state.model, state.optimizer)
    state.step += 1
    with recorded() as (streams, _):
        state.sync()
    assert streams == []
    check_equal(state, set())


def some_are_new(state: Any, count: int) -> None:
    """Only the new ranks receive, from a neighbour or from several sidecars."""
    before, is_new = digest(state), hvd.rank() >= hvd.size() - count
    if is_new:
        forget(state)
    with recorded() as (streams, logged):
        state.sync()
    assert digest(state) == before or is_new
    sent = [each.chunks for each in streams]
    assert len(sent[0]) > 1, sent
    if hvd.size() - count > 1:
        receivers = [set(each.ranks) - {each.source} for each in streams]
        assert all(min(each) >= hvd.size() - count for each in receivers), streams
    assert logged == []
    check_equal(state, {each.source for each in streams})
    # The process sets of the streams are gone, so a program may have its own of these ranks.
    own = [hvd.add_process_set(ranks) for ranks in sorted({each.ranks for each in streams}) if len(ranks) < hvd.size()]
    if is_new:
        forget(state)
    state.sync()
    check_equal(state, set())
    assert all(hvd.remove_process_set(each) for each in own)


def one_differs(state: Any) -> None:
    """It is named, and rank 0's numbers are used."""
    last = hvd.size() - 1
    expected = digest(state)
    if hvd.rank() == last:
        with torch.no_grad():
            state.model[4].bias[3] += 1
    with recorded() as (_, logged):
        state.sync()
    assert digest(state) == expected
    text = " ".join(logged)
    if hvd.rank() == 0:
        assert f"the state of rank {last} differs from that of rank 0" in text, logged
    elif hvd.rank() == last:
        assert f"this worker, rank {last}, differed" in text, logged
        assert "replaced by it: model.4.bias." in text, logged
    else:
        assert logged == []
    check_equal(state, set())


def buffers_differ(state: Any) -> None:
    """Running means are each rank's own, so nobody is warned."""
    state.model[1].running_mean += hvd.rank()
    with recorded() as (streams, logged):
        state.sync()
    assert [each.source for each in streams] == [0]
    assert logged == []
    check_equal(state, {0})


def main() -> None:
    """All of it, in one job."""
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    state = made_state()
    at_the_start(state)
    nobody_is_new(state)
    for count in range(1, hvd.size()):
        some_are_new(state, count)
    one_differs(state)
    buffers_differ(state)
    print(f"rank {hvd.rank()}: states are handed over", flush=True)
    if sys.argv[1:] == ["corrupt"]:
        forget(state) if hvd.rank() == hvd.size() - 1 else corrupt_what_is_sent()
        state.sync()


def corrupt_what_is_sent() -> None:
    """Makes this rank send other bytes than it has."""
    read = chunks.Chunk.read

    def faulty(self: chunks.Chunk) -> torch.Tensor:
        content = read(self).clone()
        content[-1] ^= 1
        return content

    chunks.Chunk.read = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
