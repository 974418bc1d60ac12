"""The client's own logic, with a mock session."""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import pickle
import threading
from typing import Any, Callable

import numpy
import pytest

import ronde
from ronde import errors
from ronde.client import Client
from ronde.handle import Handle

_set_ids = itertools.count(7)


class Operation:
    """A mock operation that completes after some polls and returns its input."""

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

    def dtype(self) -> str:
        return "uint8"

    def splits(self) -> list[int]:
        return [2, 0, 0, 0]

    def last_joined(self) -> int:
        return 2

    def set_id(self) -> int:
        return next(_set_ids)

    def take_mapped(self) -> None:
        return None

    def read_into(self, address: int, nbytes: int) -> None:
        assert nbytes == len(self.data)
        ctypes.memmove(address, self.data, nbytes)


class Session:
    """A mock session that records and echoes submissions."""

    rank, size, is_open = 1, 4, True

    def __init__(self, **answers: Any) -> None:
        self.submitted: list[tuple[Any, ...]] = []
        self.answers = answers
        self.notices: list[str] = []

    def submit(self, kind: str, dtype: str | None, shape: Any, address: int, nbytes: int, **options: Any) -> Operation:
        # Every operation has it; that it is the caller's line is shown where the place is made.
        assert options.pop("site").partition(":")[0].endswith("test_client.py")
        # Who brings no memory of their own for the result take it from shared memory.
        self.mapped = options.pop("mapped", False)
        self.submitted.append((kind, dtype, tuple(shape), options))
        result = [0] if dtype is None else list(shape)
        return Operation(ctypes.string_at(address, nbytes) if nbytes else b"", result, **self.answers)

    def submit_group(self, kind: str, tensors: Any, **options: Any) -> list[Operation]:
        return [self.submit(kind, *tensor, **dict(options)) for tensor in tensors]

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
    client.allreduce(mine, ronde.ClippedMean, codec="bfloat16")
    client.broadcast(mine, 3)
    client.allgather(mine, name="y")
    client.barrier()
    client.reduce_scatter(mine, ronde.Sum)
    client.scatter(None, 0)
    client.send(mine, 2, tag=5)
    average = {"op": 0, "prescale": 1.0, "postscale": 1.0}
    matrix, nothing = ("float32", (2, 3)), (None, ())
    assert session.submitted == [
        ("allreduce", *matrix, {"name": "x", "op": 4, "prescale": 2.0, "postscale": 3.0}),
        ("allreduce", *matrix, {**average, "op": 7, "codec": "bfloat16"}),
        ("broadcast", *matrix, {"root": 3}),
        ("allgather", *matrix, {"name": "y"}),
        ("barrier", *nothing, {}),
        ("reducescatter", *matrix, {**average, "op": 1}),
        ("scatter", *nothing, {"root": 0}),
        ("send", *matrix, {"root": 2, "tag": 5}),
    ]


def test_only_the_root_gets_a_result() -> None:
    client = client_of(Session())
    mine = numpy.arange(3)
    for root, result in ((1, mine), (0, None)):
        numpy.testing.assert_array_equal(client.reduce(mine, root), result)
        numpy.testing.assert_array_equal(client.gather(mine, root), result)


def test_splits_are_returned_when_splits_were_given() -> None:
    session = Session()
    client = client_of(session)
    mine = numpy.arange(4)
    numpy.testing.assert_array_equal(client.alltoall(mine), mine)
    result, received = client.alltoall(mine, numpy.array([0, 1, 3, 0], numpy.int32))
    numpy.testing.assert_array_equal(result, mine)
    assert (received.dtype, received.tolist()) == (numpy.int32, [2, 0, 0, 0])
    assert [options for *_, options in session.submitted] == [{}, {"splits": [0, 1, 3, 0]}]


def test_groups_are_submitted_together_and_returned_in_order() -> None:
    session = Session()
    client = client_of(session)
    tensors = [numpy.zeros(2), numpy.ones((3, 1), numpy.int8)]
    for results in (
        client.grouped_allreduce(tensors, ronde.Sum, "g"),
        client.grouped_allgather(tensors),
        client.grouped_reduce_scatter(tensors),
        client.grouped_broadcast(tensors, 1),
    ):
        for result, tensor in zip(results, tensors):
            numpy.testing.assert_array_equal(result, tensor)
    assert [submitted[:3] for submitted in session.submitted[:2]] == [
        ("allreduce", "float64", (2,)),
        ("allreduce", "int8", (3, 1)),
    ]
    assert client.grouped_allreduce([]) == []


def test_process_sets_know_their_ranks() -> None:
    session = Session()
    client = client_of(session)
    whole = client.global_process_set
    assert (whole.id, whole.ranks, whole.size(), whole.rank(), whole.included()) == (0, [0, 1, 2, 3], 4, 1, True)
    some = client.add_process_set([3, 1])
    number = some.id
    assert str(some) == f"ProcessSet(id={number}, ranks=[1, 3])"
    assert (some.size(), some.rank()) == (2, 0)
    client.allgather(numpy.zeros(1), process_set=some)
    assert session.submitted[-1] == ("allgather", "float64", (1,), {"set": number})
    assert not client.remove_process_set(whole)
    assert client.remove_process_set(some)
    assert session.submitted[-1] == ("remove_process_set", None, (), {"removed": number})
    assert some.id is None
    assert not client.remove_process_set(some)
    own = client.add_process_set_async([2, 0], members_only=True)
    assert session.submitted[-1] == ("add_process_set", None, (), {"ranks": [2, 0], "members_only": True})
    formed = own.wait()
    assert (formed.ranks, own.wait() is formed) == ([0, 2], True)
    assert client.remove_process_set(99)  # one of other ranks
    assert session.submitted[-1] == ("remove_process_set", None, (), {"removed": 99})
    assert formed.id is not None
    assert client.remove_process_set(formed.id)
    assert formed.id is None
    others = client.add_process_set([0, 2])
    assert not others.included()
    with pytest.raises(ValueError, match="not part of provided process set"):
        others.rank()
    assert client.join() == 2


def test_wrong_arguments_are_not_submitted() -> None:
    session = Session()
    client = client_of(session)
    others, removed = client.add_process_set([0, 2]), client.add_process_set([1, 2])
    client.remove_process_set(removed)
    session.submitted.clear()
    tensor = numpy.zeros(4)
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("ranks are integers from 0, not -1", lambda: client.scatter(tensor, -1)),
        ("out is of type", lambda: client.allreduce(numpy.zeros(2), out=numpy.zeros(1))),
        ("out is of type", lambda: client.allreduce(numpy.zeros(2), out=numpy.zeros(2, numpy.int64))),
        ("complex128 is not supported", lambda: client.allgather(numpy.zeros(1, numpy.complex128))),
        ("NoneType is no tensor", lambda: client.reduce(None, 0)),
        ("1-D integers, such as int32", lambda: client.alltoall(tensor, numpy.zeros((2, 2), int))),
        ("1-D integers, such as int32", lambda: client.alltoall(tensor, [1.0, 1.0, 1.0, 1.0])),
        ("that are 0 or more", lambda: client.alltoall(tensor, [-1, 5, 0, 0])),
        ("ranks are integers from 0, not 1.5", lambda: client.recv(1.5)),  # type: ignore[arg-type]
        ("tags are integers", lambda: client.recv(2, tag=-1)),
        ("ranks are integers", lambda: client.add_process_set(["one"])),  # type: ignore[list-item]
        ("not a member of the provided process set", lambda: client.allreduce(tensor, process_set=others)),
        ("has not been registered", lambda: client.barrier(process_set=removed)),
    ]
    for words, call in wrong:
        with pytest.raises(ValueError, match=words):
            call()
    assert session.submitted == []


def test_every_wait_for_a_handle_returns_its_result() -> None:
    handle = client_of(Session(waits=3)).allgather_async(numpy.ones(2))
    assert not handle.poll()
    with pytest.raises(TimeoutError, match=r"allreduce\.x is still in flight"):
        handle.wait(timeout=0)
    result = handle.wait()
    assert handle.poll()
    assert handle.wait() is result


def test_threads_that_wait_for_a_handle_read_its_result_once() -> None:
    """The memory of a result can be taken once."""
    reads: list[Any] = []
    found: list[Any] = []

    def read(operation: Any) -> object:
        reads.append(operation)
        if len(reads) == 1:
            other.start()
            other.join(0.5)  # it has read, too, by then, or it waits for this thread
        return object()

    operation: Any = Operation(b"", [])
    handle = Handle(lambda: None, operation, read)
    other = threading.Thread(target=lambda: found.append(handle.wait()))
    result = handle.wait()
    other.join(60)
    assert reads == [operation]
    assert found == [result]


def test_every_wait_for_a_failed_handle_raises() -> None:
    failure = errors.from_parts("mismatch", "rank 2 has shape [3]", 2, None, "allreduce.x", "caller")
    handle = client_of(Session(error=failure)).allgather_async(numpy.ones(2))
    for _ in range(2):
        with pytest.raises(ronde.MismatchError, match="rank 2") as caught:
            handle.wait()
        assert (caught.value.rank, caught.value.sidecar, caught.value.tensor) == (2, None, "allreduce.x")


def test_arguments_of_other_libraries_are_no_reductions_tags_or_process_sets() -> None:
    torch_op = pytest.importorskip("torch.distributed").ReduceOp
    session = Session()
    client, mine = client_of(session), numpy.ones(2)
    # PyTorch's SUM converts to the number of Average, and its AVG, like True, to that of Sum.
    ops: list[Any] = [torch_op.SUM, torch_op.AVG, True, "sum", sum, numpy.add, 1.0, None]
    tags: list[Any] = [1.5, "a", None, -1, 1 << 32]
    sets: list[Any] = [0, [0, 1], "all"]
    for op in ops:
        for call in (client.allreduce, client.reduce_scatter):
            with pytest.raises(ValueError, match=r"op is .*; give a reduction of ronde: ronde\.Average, ronde\.Sum"):
                call(mine, op)
    for tag in tags:
        with pytest.raises(ValueError, match="tags are integers from 0"):
            client.send(mine, 2, tag=tag)
    for process_set in sets:
        with pytest.raises(ValueError, match=r"process_set is .*; give a ProcessSet"):
            client.barrier(process_set=process_set)
    removed: Any = "all"
    with pytest.raises(ValueError, match="remove_process_set takes a ProcessSet or its number, not 'all'"):
        client.remove_process_set(removed)
    assert session.submitted == []
    numbers: list[Any] = [numpy.int64(ronde.Max), numpy.uint8(3)]
    client.allreduce(mine, numbers[0])
    client.send(mine, 2, numbers[1])
    assert [options for *_, options in session.submitted] == [
        {"op": 4, "prescale": 1.0, "postscale": 1.0},
        {"root": 2, "tag": 3},
    ]


def test_a_dropped_client_is_closed_unless_an_operation_is_in_flight() -> None:
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
def test_the_cause_selects_the_exception_class(cause: str, kind: type[Exception]) -> None:
    error = errors.from_parts(cause, "text", 1, 2, "name", "peer")
    assert type(error) is kind
    assert isinstance(error, RuntimeError)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_all_errors_in_the_environment_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RONDE_SOCKET", "RONDE_JOB", "RONDE_RANK", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ronde.RondeError) as caught:
        ronde.connect(start_timeout=-1)
    assert caught.value.cause == "settings"
    for word in ("RONDE_SOCKET", "RONDE_JOB", "RONDE_RANK", "RONDE_START_TIMEOUT"):
        assert word in str(caught.value)


@pytest.mark.parametrize(("rank", "size"), [("0", "2"), ("1", "4")])
def test_a_launcher_below_another_one_is_named(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    variables = {"RONDE_SOCKET": "/none", "RONDE_JOB": "job", "RONDE_RANK": "0", "RONDE_SIZE": "4"}
    torchrun = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**variables, **torchrun}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ronde.RondeError, match=f"RONDE_RANK is 0 and RANK is {rank}, .* Use one launcher") as caught:
        ronde.connect()
    assert caught.value.cause == "settings"
    # `ronde run` below torchrun has set PyTorch's variables, too, and one process of torchrun on a host is that of its
    # rank, which may have another number there.
    for own, local in (("0", "4"), ("1", "1")):
        monkeypatch.setenv("RANK", own)
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with pytest.raises(ronde.RondeError, match="token") as caught:
            ronde.connect()
        assert caught.value.cause == "token"


def test_the_error_names_a_missing_sidecar(tmp_path: Any) -> None:
    (tmp_path / "rank-0.token").write_bytes(bytes(32))
    with pytest.raises(ronde.RondeError, match="no sidecar answers") as caught:
        ronde.connect(tmp_path, "job", 0, connect_timeout=0.05)
    assert (caught.value.cause, caught.value.blame) == ("connect", "peer")
