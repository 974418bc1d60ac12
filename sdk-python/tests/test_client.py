"""The client's own logic, against a session that is played."""

from __future__ import annotations

import ctypes
import gc
import logging
import pickle
from typing import Any

import numpy
import pytest

import ronde
from ronde import errors
from ronde.client import Client


class Operation:
    """Complete after some polls; answers with the input."""

    name = "allreduce.x"

    def __init__(self, data: bytes, shape: list[int], waits: int = 0, error: Exception | None = None) -> None:
        self.data, self._shape, self.waits, self.error = data, shape, waits, error

    def poll(self) -> bool:
        return self.waits == 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits = max(0, self.waits - 1)
        return self.poll()

    def shape(self) -> list[int]:
        if self.error:
            raise self.error
        return self._shape

    def read_into(self, address: int, nbytes: int) -> None:
        assert nbytes == len(self.data)
        ctypes.memmove(address, self.data, nbytes)


class Session:
    """Notes what is submitted and echoes it."""

    rank, size, is_open = 1, 4, True

    def __init__(self, **answers: Any) -> None:
        self.submitted: list[tuple[Any, ...]] = []
        self.answers = answers
        self.notices: list[str] = []

    def submit(self, kind: str, dtype: str, shape: Any, address: int, nbytes: int, **options: Any) -> Operation:
        self.submitted.append((kind, dtype, tuple(shape), options))
        return Operation(ctypes.string_at(address, nbytes) if nbytes else b"", list(shape), **self.answers)

    def close(self) -> None:
        self.is_open = False

    def take_notices(self) -> list[str]:
        notices, self.notices = self.notices, []
        return notices


def client_of(session: Session) -> Client:
    return Client(session)  # type: ignore[arg-type]


def test_arguments_reach_the_session() -> None:
    session = Session()
    client = client_of(session)
    mine = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    result = client.allreduce(mine, ronde.Max, "x", 2.0, 3.0)
    numpy.testing.assert_array_equal(result, mine)
    assert result is not mine
    client.broadcast(mine, 3)
    client.allgather(mine, name="y")
    client.barrier()
    assert session.submitted == [
        ("allreduce", "float32", (2, 3), {"name": "x", "op": 4, "prescale": 2.0, "postscale": 3.0}),
        ("broadcast", "float32", (2, 3), {"name": None, "root": 3}),
        ("allgather", "float32", (2, 3), {"name": "y"}),
        ("barrier", "uint8", (0,), {"name": None}),
    ]


def test_wrong_arguments_are_not_submitted() -> None:
    session = Session()
    client = client_of(session)
    with pytest.raises(ValueError, match="invalid root rank 4"):
        client.broadcast(numpy.zeros(1), 4)
    for out in (numpy.zeros(1), numpy.zeros(2, numpy.int64)):
        with pytest.raises(ValueError, match="out is of type"):
            client.allreduce(numpy.zeros(2), out=out)
    with pytest.raises(ValueError, match="not supported"):
        client.allgather(numpy.zeros(1, numpy.complex128))
    assert session.submitted == []


def test_a_handle_gives_its_result_as_often_as_it_is_asked() -> None:
    handle = client_of(Session(waits=3)).allgather_async(numpy.ones(2))
    assert not handle.poll()
    with pytest.raises(TimeoutError, match=r"allreduce\.x is still in flight"):
        handle.wait(timeout=0)
    result = handle.wait()
    assert handle.poll()
    assert handle.wait() is result


def test_a_failure_is_raised_as_often_as_it_is_asked() -> None:
    failure = errors.from_parts("mismatch", "rank 2 has shape [3]", 2, None, "allreduce.x", "caller")
    handle = client_of(Session(error=failure)).allgather_async(numpy.ones(2))
    for _ in range(2):
        with pytest.raises(ronde.MismatchError, match="rank 2") as caught:
            handle.wait()
        assert (caught.value.rank, caught.value.sidecar, caught.value.tensor) == (2, None, "allreduce.x")


def test_a_client_that_is_dropped_is_closed_but_not_while_something_is_in_flight() -> None:
    session = Session()
    handle = client_of(session).allgather_async(numpy.ones(2))
    gc.collect()
    assert session.is_open
    del handle
    gc.collect()
    assert not session.is_open


def test_notices_are_logged_while_waiting(caplog: pytest.LogCaptureFixture) -> None:
    session = Session(waits=3)
    session.notices = ["rank 3 is late"]
    with caplog.at_level(logging.WARNING, logger="ronde"):
        client_of(session).allreduce(numpy.ones(2))
    assert "rank 3 is late" in caplog.text


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("mismatch", ronde.MismatchError),
        ("refused", ronde.RefusedError),
        ("limit", ronde.RefusedError),
        ("rank_lost", ronde.PeerLostError),
        ("sidecar_lost", ronde.PeerLostError),
        ("shut_down", ronde.ShutDownError),
        ("timed_out", ronde.TimedOutError),
        ("used_after_fork", ronde.RondeError),
    ],
)
def test_causes_choose_the_exception(cause: str, kind: type[Exception]) -> None:
    error = errors.from_parts(cause, "text", 1, 2, "name", "peer")
    assert type(error) is kind
    assert isinstance(error, RuntimeError)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_all_problems_of_the_environment_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RONDE_SOCKET", "RONDE_JOB", "RONDE_RANK", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ronde.RondeError) as caught:
        ronde.connect(start_timeout=-1)
    assert caught.value.cause == "settings"
    for word in ("RONDE_SOCKET", "RONDE_JOB", "RONDE_RANK", "RONDE_START_TIMEOUT"):
        assert word in str(caught.value)


def test_a_sidecar_that_is_not_there_is_named(tmp_path: Any) -> None:
    (tmp_path / "rank-0.token").write_bytes(bytes(32))
    with pytest.raises(ronde.RondeError, match="no sidecar answers") as caught:
        ronde.connect(tmp_path, "job", 0, connect_timeout=0.05)
    assert (caught.value.cause, caught.value.blame) == ("connect", "peer")
