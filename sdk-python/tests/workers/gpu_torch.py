"""Run by every rank on a software device: `ronde.torch` and the backend take tensors that stand in for those on a GPU.

A PyTorch for CPUs has no such tensors, so these are of a subclass: the type, the shape and the device are PyTorch's,
the memory is the software device's, and there are no kernels. Streams of `torch.cuda` are the software device's, too.
So this runs ronde's code for PyTorch's tensors on GPUs, and none of PyTorch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING, Any

import numpy
import software
import torch
import torch.distributed

import ronde.torch as hvd
from ronde.torch.distributed.group import Group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ELEMENTS = 100_000


class Tensor(torch.Tensor):
    """A tensor on the software device."""

    array: software.DeviceArray

    @staticmethod
    def __new__(cls, content: numpy.ndarray[Any, Any]) -> Tensor:
        dtype = torch.from_numpy(numpy.empty(0, content.dtype)).dtype
        made: Tensor = torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=dtype, device="cuda:0")
        made.array = software.DeviceArray(content)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} is called, and the software device has no kernels")

    def data_ptr(self) -> int:
        return self.array.address

    def detach(self) -> Tensor:
        return self

    def contiguous(self, *arguments: Any, **options: Any) -> Tensor:
        return self

    def resolve_neg(self) -> Tensor:
        return self

    def resolve_conj(self) -> Tensor:
        return self

    def is_contiguous(self, *arguments: Any, **options: Any) -> bool:
        return True

    def is_neg(self) -> bool:
        return False

    def is_conj(self) -> bool:
        return False

    def read(self) -> numpy.ndarray[Any, Any]:
        """Waits for the current stream, and returns a copy."""
        self.array.stream = streams.current
        return self.array.read()


class Event:
    """An event of the software device, with the methods of `torch.cuda.Event` that ronde calls."""

    def __init__(self, stream: software.Stream) -> None:
        found = ctypes.c_size_t()
        software.call("cuEventCreate", ctypes.byref(found), 0)
        self.handle = found
        software.call("cuEventRecord", self.handle, ctypes.c_size_t(stream.handle))

    def query(self) -> bool:
        return bool(software.code("cuEventQuery", self.handle) == 0)

    def synchronize(self) -> None:
        software.call("cuEventSynchronize", self.handle)


class Stream(software.Stream):
    """A stream, with the methods of `torch.cuda.Stream` that ronde calls."""

    def __init__(self, device: Any = None) -> None:
        software.use()
        super().__init__()

    @property
    def cuda_stream(self) -> int:
        return self.handle

    def record_event(self) -> Event:
        software.use()
        return Event(self)

    def wait_event(self, event: Event) -> None:
        software.use()
        software.call("cuStreamWaitEvent", ctypes.c_size_t(self.handle), event.handle, 0)


class Streams:
    """The current stream of each thread: the same one, except where a block sets another."""

    def __init__(self) -> None:
        self._shared = Stream()
        self._of_thread = threading.local()

    @property
    def current(self) -> Stream:
        found: Stream = getattr(self._of_thread, "stream", self._shared)
        return found

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.stream = self.current, stream
        yield
        self._of_thread.stream = before


streams = Streams()


def stand_in() -> None:
    """Puts the software device in the place of PyTorch's functions for GPUs."""
    torch.cuda.current_stream = lambda device=None: streams.current  # type: ignore[assignment]
    torch.cuda.Stream = Stream  # type: ignore[assignment, misc]
    torch.cuda.stream = streams.use  # type: ignore[assignment]
    empty = torch.empty

    def on_device(shape: Sequence[int], *, dtype: torch.dtype, device: Any = "cpu", **options: Any) -> torch.Tensor:
        if torch.device(device).type != "cuda":
            return empty(shape, dtype=dtype, device=device, **options)
        return Tensor(numpy.zeros(shape, str(dtype).partition(".")[2]))

    torch.empty = on_device  # type: ignore[assignment]


def check_horovod() -> None:
    """In place and into new memory, after kernels of the current stream and before later ones."""
    size = hvd.size()
    tensor = Tensor(numpy.ones(ELEMENTS, "uint8"))
    tensor.array.stream = streams.current
    streams.current.hold(True)
    tensor.array.fill(2)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="in place")
    assert not hvd.poll(handle), "its kernel has not run"
    streams.current.hold(False)
    before = software.count("stream_synchronizations")
    assert hvd.synchronize(handle) is tensor
    assert software.count("stream_synchronizations") == before
    assert (tensor.read() == 2 * size).all()
    made = hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum, name="new"))
    assert isinstance(made, Tensor)
    assert (made.read() == 2 * size * size).all()
    together = [Tensor(numpy.full(count, 1.0)) for count in (3, 70_000)]
    for result in hvd.synchronize(hvd.grouped_allreduce_async_(together, op=hvd.Sum, name="group")):
        assert (result.read() == size).all()
    gathered = hvd.synchronize(hvd.allgather_async(Tensor(numpy.full((hvd.rank() + 1, 2), 5.0)), name="rows"))
    assert gathered.shape == (size * (size + 1) // 2, 2)
    assert (gathered.read() == 5.0).all()
    root = Tensor(numpy.full(70_000, float(hvd.rank())))
    assert (hvd.synchronize(hvd.broadcast_async_(root, size - 1, name="root")).read() == size - 1).all()


def check_backend() -> None:
    """An operation of the backend, finished by another thread on another stream, and awaited on this one's."""
    tensor = Tensor(numpy.ones(ELEMENTS, "float32"))
    work = group.allreduce([tensor], torch.distributed.AllreduceOptions())
    software.set_copy_delay_us(20_000)
    work.wait()
    assert (tensor.read() == group.size()).all()
    software.set_copy_delay_us(0)
    many = [Tensor(numpy.full(ELEMENTS, float(index))) for index in range(8)]
    works = [group.allreduce([each], torch.distributed.AllreduceOptions()) for each in many]
    for index in reversed(range(8)):
        works[index].wait()
    for index, each in enumerate(many):
        assert (each.read() == index * group.size()).all()
    assert (work.get_future().wait()[0].read() == group.size()).all()
    check_received()


def check_received() -> None:
    """Results of operations to which this rank brings no tensor come after earlier work of the target's stream."""
    rank, size = group.rank(), group.size()
    options = torch.distributed.ScatterOptions()
    options.rootRank = 0
    # In main memory: the root joins them, for which the software device has no kernel.
    parts = [[torch.full((ELEMENTS,), 5.0, dtype=torch.float64) for _ in range(size)]] if rank == 0 else []
    target = Tensor(numpy.zeros(ELEMENTS))
    begin_late(target)
    group.scatter([target], parts, options).wait()
    streams.current.hold(False)
    assert (target.read() == 5.0).all()
    if size == 1:
        return
    if rank == 0:
        group.send([Tensor(numpy.full(ELEMENTS, 6.0))], 1, 3).wait()
        group.send([Tensor(numpy.full(ELEMENTS, 7.0))], 1, 3).wait()
        return
    for value, receive in ((6.0, lambda: group.recv([target], 0, 3)), (7.0, lambda: group.recv_anysource([target], 3))):
        begin_late(target)
        receive().wait()
        streams.current.hold(False)
        assert (target.read() == value).all()


def begin_late(target: Tensor) -> None:
    """Begins a kernel on the tensor's memory that runs when the stream is let go."""
    target.array.stream = streams.current
    streams.current.hold(True)
    target.array.fill(1)


if __name__ == "__main__":
    stand_in()
    hvd.init()
    check_horovod()
    hvd.barrier()  # a rank that shuts down ends the session of the others
    hvd.shutdown()
    torch.distributed.init_process_group("ronde")
    whole: Any = torch.distributed.group.WORLD
    # Without C++ in between, which dispatches by kernels.
    group: Any = whole if isinstance(whole, Group) else whole._get_backend(torch.device("cpu"))
    assert isinstance(group, Group), type(group)
    check_backend()
    torch.distributed.destroy_process_group()
    print("stand-ins hold")
