"""Run by every rank: the timeline of rank 0, in files that are complete at every moment.

Arguments: a directory, and what to do.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import numpy

import ronde

Event = dict[str, Any]


def read(path: pathlib.Path) -> list[Event]:
    """The events of a file, whose begins and ends match on each row."""
    events: list[Event] = json.loads(path.read_text())
    assert (events[0]["name"], events[0]["ph"]) == ("process_name", "M"), events[0]
    began = events[0]["args"]["start_time_since_epoch_in_micros"]
    assert abs(began / 1e6 - time.time()) < 600, began
    open_slices: dict[tuple[int, int], int] = {}
    for event in events:
        row = (event["pid"], event.get("tid", 0))
        open_slices[row] = open_slices.get(row, 0) + {"B": 1, "E": -1}.get(event["ph"], 0)
        assert open_slices[row] in (0, 1), event
    assert not any(open_slices.values()), open_slices
    return events


def of_tensor(events: list[Event], name: str) -> list[Event]:
    """Returns the events of one tensor."""
    processes = [event for event in events if event.get("name") == "process_name"]
    named = [event["pid"] for event in processes if event["args"]["name"] == name]
    assert len(named) == 1, (name, named)
    return [event for event in events if event["pid"] == named[0]]


def step(client: ronde.Client, name: str, elements: int = 1_000_000) -> None:
    """An all-reduce of float32, large enough to be exchanged."""
    total = client.allreduce(numpy.ones(elements, "float32"), ronde.Sum, name=name)
    assert total[0] == client.size


def check_allreduce(events: list[Event], name: str, size: int) -> None:
    """Negotiation with every rank, the operation with its type and shape, and what the threads did."""
    mine = of_tensor(events, f"allreduce.{name}")
    begins = {event["name"]: event for event in mine if event["ph"] == "B"}
    assert set(begins) == {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"}, begins
    arguments = begins["ALLREDUCE"]["args"]
    assert (arguments["dtype"], arguments["shape"]) == ("float32", "[1000000]"), arguments
    spans = [event for event in mine if event["ph"] == "X"]
    ranks = [event["name"] for event in spans if event["tid"] == begins["NEGOTIATE_ALLREDUCE"]["tid"]]
    assert sorted(ranks, key=int) == [str(rank) for rank in range(size)], ranks
    phases = {event["name"] for event in spans} - set(ranks)
    assert {"QUEUE", "PERFORM", "READ_INPUT", "COPY_RESULT"} <= phases, phases


def record(client: ronde.Client, directory: pathlib.Path) -> None:
    """Two files after each other, with and without marks."""
    first, second = directory / "first.json", directory / "second.json"
    step(client, "before")
    client.start_timeline(first, mark_cycles=True)
    client.barrier("recording")
    for _ in range(2):
        step(client, "test_allreduce")
    step(client, "small", 4)
    client.broadcast(numpy.ones(3), 0, name="b")
    client.allgather(numpy.ones((2, 2)), name="g")
    client.alltoall(numpy.ones(client.size * 2), name="a")
    client.reduce_scatter(numpy.ones(client.size), ronde.Sum, name="s")
    client.join()
    client.barrier("over")
    client.stop_timeline()
    if client.rank == 0:
        text = first.read_text()
        events = read(first)
        assert "before" not in text
        operations = ("ALLREDUCE", "BROADCAST", "ALLGATHER", "ALLTOALL", "REDUCESCATTER", "JOIN", "BARRIER")
        for word in ("NEGOTIATE_ALLREDUCE", "CYCLE_START", *operations):
            assert f'"{word}"' in text, word
        mine = of_tensor(events, "allreduce.test_allreduce")
        assert sum(event.get("name") == "NEGOTIATE_ALLREDUCE" for event in mine) == 2, mine
    client.start_timeline(os.fspath(second))
    client.barrier("again")
    step(client, "test_allreduce")
    client.stop_timeline()
    client.stop_timeline()
    if client.rank == 0:
        assert "CYCLE_START" not in second.read_text()
        check_allreduce(read(second), "test_allreduce", client.size)
    else:
        assert not list(directory.glob(f"*{client.rank}*"))
    # In the place of the one before, and ended by the session.
    for name in ("third", "fourth"):
        client.start_timeline(directory / name)
        client.barrier(name)
        step(client, name)
    if client.rank == 0:
        check_allreduce(read(directory / "third"), "third", client.size)


def refuse(client: ronde.Client, directory: pathlib.Path) -> None:
    """A file that cannot be made is named, and the session goes on."""
    bad = directory / "nowhere" / "timeline.json"
    try:
        client.start_timeline(bad)
        assert client.rank != 0
    except ronde.RondeError as error:
        assert client.rank == 0
        assert (error.cause, error.blame) == ("timeline", "local"), (error.cause, error.blame)
        assert f"{bad} cannot be recorded: No such file or directory" in str(error), error
    step(client, "goes_on")


def ahead(client: ronde.Client, directory: pathlib.Path) -> None:
    """Steps that repeat are recorded also when they are no longer negotiated."""
    client.start_timeline(directory / "ahead")
    client.barrier("recording")
    for _ in range(40):
        step(client, "weights")
    client.stop_timeline()
    if client.rank == 0:
        mine = of_tensor(read(directory / "ahead"), "allreduce.weights")
        begins = [event for event in mine if event["ph"] == "B" and event["name"] == "ALLREDUCE"]
        assert len(begins) == 40, len(begins)
        ran_ahead = [event["args"]["ahead"] for event in begins]
        assert any(ran_ahead) == (client.cross_size > 1), ran_ahead


def from_the_start(client: ronde.Client) -> None:
    """What is named outside of the program is recorded at once; the session's end completes it."""
    step(client, "test_allreduce")


def die(client: ronde.Client, directory: pathlib.Path) -> None:
    """Whenever the recording process is killed, its file is whole."""
    path = directory / "killed"
    client.start_timeline(path)
    client.barrier("recording")
    step(client, "test_allreduce")
    deadline = time.monotonic() + 60
    while client.rank == 0:
        if "PERFORM" in path.read_text():
            os.kill(os.getpid(), signal.SIGKILL)
        assert time.monotonic() < deadline, path.read_text()
    client.barrier("never")


def main() -> None:
    """One of these."""
    directory, what = pathlib.Path(sys.argv[1]), sys.argv[2]
    client = ronde.connect()
    if what == "start":
        from_the_start(client)
    else:
        {"record": record, "refuse": refuse, "ahead": ahead, "die": die}[what](client, directory)
    print(f"rank {client.rank}: {what} is done", flush=True)
    client.barrier("end")
    client.close()


if __name__ == "__main__":
    main()
