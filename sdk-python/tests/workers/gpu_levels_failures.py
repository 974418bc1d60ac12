"""Run by every rank of a host on a software device: what fails in two levels is named on each rank, and nothing hangs.

The argument selects the case.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import time
from typing import Callable

import numpy
import own_sidecar
import software

import ronde


def array(client: ronde.Client, count: int = 1000) -> software.DeviceArray:
    return software.DeviceArray(numpy.full(count, client.rank + 1.0, "float32"), software.Stream())


def failure(call: Callable[[], object]) -> ronde.RondeError:
    """Returns what a call raises."""
    try:
        call()
    except ronde.RondeError as error:
        return error
    raise AssertionError("it succeeded")


def reduced(client: ronde.Client, name: str) -> None:
    """All-reduces in two levels, and checks the result."""
    found = array(client)
    client.allreduce(found, ronde.Sum, name, out=found)
    total = sum(range(1, client.size + 1))
    numpy.testing.assert_array_equal(found.read(), numpy.full(1000, total, "float32"))


def pending() -> set[tuple[int, str]]:
    """Returns the ranks and names of the requests that this host's sidecar has not performed yet."""
    return own_sidecar.pending(own_sidecar.page())


def named(requests: set[tuple[int, str]], name: str) -> bool:
    """Whether a request has this name."""
    return any(of == name for _, of in requests)


def killed(client: ronde.Client) -> None:
    """The last rank dies while the others of its host are in a collective of NCCL with it, and further ones are queued.

    It dies when they have reported that, and each other rank that it has submitted its operations.
    """
    # The launcher ends all ranks 1 s after one has died; those that are left print what they have received.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reduced(client, "first")
    last = client.size - 1
    # Of different lengths, so that no call of NCCL is taken for another one.
    arrays = [array(client, 1001 + 2 * at) for at in range(3)]
    if client.rank == last:
        # NCCL accepts its call and enqueues nothing, so the others' kernels wait for it.
        software.fail("ncclReduceScatter" if client.cross_size > 1 else "ncclAllReduce", 7, 1)
    names = ("second", "third", "fourth")
    handles = [client.allreduce_async(each, ronde.Sum, name, out=each) for each, name in zip(arrays, names)]
    if client.rank == last:
        for rank in range(last):
            client.recv(rank)
        print(f"killed at {time.monotonic()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if client.cross_rank == client.cross_size - 1:
        software.eventually("NCCL waits for the last rank", lambda: software.count("waiting") == 1)
    # Not waited for: the last rank may have received it, and be dead before this rank's sidecar knows.
    ready = client.send_async(numpy.ones(1, "int8"), last)
    failure(functools.partial(handles[0].wait, 50))
    print(f"reported at {time.monotonic()}", flush=True)
    for handle in handles:
        error = failure(functools.partial(handle.wait, 50))
        assert isinstance(error, ronde.PeerLostError), error
        assert error.rank == last, error
    print(f"rank {last} is lost", flush=True)
    del handles, handle, ready
    client.close()
    software.eventually("communicators are aborted", lambda: software.count("communicators") == 0)
    print("communicators are aborted", flush=True)
    print("the session is closed", flush=True)


def aborted(client: ronde.Client) -> None:
    """NCCL fails on one rank: each rank gets its reason, later operations fail at once, and a new client works."""
    reduced(client, "first")
    if client.rank == 1:
        software.fail("ncclReduceScatter" if client.cross_size > 1 else "ncclAllReduce", 3, 1)
    found = array(client)
    error = failure(lambda: client.allreduce(found, ronde.Sum, "second", out=found))
    print(f"second: {error}", flush=True)
    error = failure(lambda: client.allreduce(found, ronde.Sum, "third", out=found))
    print(f"third: {error}", flush=True)
    software.eventually("communicators are aborted", lambda: software.count("communicators") == 0)
    on_host = numpy.ones(3, "float32")
    numpy.testing.assert_array_equal(client.allreduce(on_host, ronde.Sum), client.size * on_host)
    software.close(client)
    print("the session is closed", flush=True)


def missing(client: ronde.Client) -> None:
    """A rank does not submit: it is named while the others wait, and they are notified when one of them gives up."""
    reduced(client, "first")
    found = array(client)
    if client.rank == 1:
        handle = client.allreduce_async(found, ronde.Sum, "second", out=found)
        try:
            handle.wait(4.0)
        except TimeoutError as error:
            print(f"second: {error}", flush=True)
        del handle
    elif client.rank > 1:
        error = failure(functools.partial(client.allreduce, found, ronde.Sum, "second", out=found))
        print(f"second: {error}", flush=True)
    client.barrier()
    reduced(client, "third")
    software.close(client)
    print("the session is closed", flush=True)


def out_of_memory(client: ronde.Client) -> None:
    """A rank has no memory for the buffer: all ranks are notified, and the next operation works."""
    reduced(client, "first")
    found = array(client, 3_000_000)
    if client.rank == 1:
        software.fail("cuMemAlloc_v2", 2, 0)
    error = failure(lambda: client.allreduce(found, ronde.Sum, "second", out=found))
    print(f"second: {error}", flush=True)
    software.heal()
    client.barrier()
    reduced(client, "third")
    software.close(client)
    print("the session is closed", flush=True)


def dropped(client: ronde.Client) -> None:
    """A rank drops its handle before all are there: the others are notified."""
    reduced(client, "first")
    found = array(client)
    if client.rank == 0:
        del found
        handle = client.allreduce_async(array(client), ronde.Sum, "second", out=array(client))
        software.eventually("the ticket is sent", lambda: named(pending(), "allreduce.second"))
        del handle
        software.eventually("it is withdrawn", lambda: not named(pending(), "allreduce.second"))
        client.barrier()
        client.barrier()
    else:
        client.barrier()
        error = failure(lambda: client.allreduce(found, ronde.Sum, "second", out=found))
        print(f"second: {error}", flush=True)
        client.barrier()
    reduced(client, "third")
    software.close(client)
    print("the session is closed", flush=True)


def withdrawn_late(client: ronde.Client) -> None:
    """A handle is dropped when all tickets are complete, and its rank has not seen that: the others get the result."""
    reduced(client, "first")
    arrays = [array(client, count) for count in (1001, 1003)]
    if client.rank == 0:
        software.block("ncclAllReduce", True)
        second = client.allreduce_async(arrays[0], ronde.Sum, "second", out=arrays[0])
        third = client.allreduce_async(arrays[1], ronde.Sum, "third", out=arrays[1])
        tickets = {(0, "allreduce.second"), (0, "allreduce.third")}
        software.eventually("both tickets are sent, before the others submit", lambda: tickets <= pending())
        client.barrier()
        software.eventually("NCCL is called for the second one", lambda: software.count("blocked") == 1)
        client.barrier()
        # They are complete, then, for all ranks; this one has not seen that.
        software.eventually("the others' tickets are sent", lambda: not named(pending(), "allreduce.third"))
        del third
        software.block("ncclAllReduce", False)
        second.wait(30)
    else:
        client.barrier()
        second = client.allreduce_async(arrays[0], ronde.Sum, "second", out=arrays[0])
        third = client.allreduce_async(arrays[1], ronde.Sum, "third", out=arrays[1])
        client.barrier()
        second.wait(30)
        third.wait(30)
        total = sum(range(1, client.size + 1))
        numpy.testing.assert_array_equal(arrays[1].read(), numpy.full(1003, total, "float32"))
        print("third: it has the result", flush=True)
    client.barrier()
    reduced(client, "fourth")
    software.close(client)
    print("the session is closed", flush=True)


def failed_before_ticket(client: ronde.Client) -> None:
    """The set of a rank has failed when its next ticket is complete: the ranks of the other host are notified at once.

    Ranks 0 and 1 are on one host, 2 and 3 on another one; 1 and 3 exchange their parts. The second phase fails on rank
    1 alone, of which the other host does not learn.
    """
    reduced(client, "first")
    held = client.rank == 3
    second, third = array(client, 1001), array(client, 1003)
    if client.rank == 1:
        software.fail("ncclAllGather", 3, 1)
    handle = client.allreduce_async(second, ronde.Sum, "second", out=second)
    if held:
        assert third.stream is not None
        third.stream.hold(True)
        third.fill(0)
    last = client.allreduce_async(third, ronde.Sum, "third", out=third)
    if client.rank == 1:
        print(f"second: {failure(handle.wait)}", flush=True)
        client.send(numpy.ones(1, "int8"), 3)
    elif held:
        handle.wait(30)
        client.recv(1)
        third.stream.hold(False)
    if client.rank in (1, 3):
        begun = time.monotonic()
        error = failure(functools.partial(last.wait, 50))
        print(f"third: {error} within {time.monotonic() - begun:.1f} s", flush=True)
        assert "ncclInternalError" in str(error), error
        assert time.monotonic() - begun < 15, "not by the peer timeout, which is 30 s"
        client.send(numpy.ones(1, "int8"), client.rank - 1)
    else:
        client.recv(client.rank + 1)
    print("the others are notified", flush=True)
    software.close(client)


def grouped(client: ronde.Client) -> None:
    """A group of which one tensor has two levels and another one, on another GPU of one rank, has one."""
    reduced(client, "first")
    here = array(client, 1001)
    if client.rank == 0:
        software.use(client.local_size)
    there = array(client, 1003)
    software.use(client.local_rank)
    for name in ("second", "third"):
        client.grouped_allreduce([here, there], ronde.Sum, name, out=[here, there])
    total = sum(range(1, client.size + 1)) * client.size
    numpy.testing.assert_array_equal(here.read(), numpy.full(1001, total, "float32"))
    numpy.testing.assert_array_equal(there.read(), numpy.full(1003, total, "float32"))
    assert client.gpu_levels[:2] == (3, 2), client.gpu_levels
    software.close(client)
    print("the session is closed", flush=True)


def in_last_phase(client: ronde.Client, name: str) -> tuple[software.DeviceArray, ronde.Handle]:
    """Submits an operation. Returns when this rank's thread is in a blocked call of NCCL, for the last phase."""
    found = array(client)
    software.block(last_phase(client), True)
    handle = client.allreduce_async(found, ronde.Sum, name, out=found)
    software.eventually("it is in its last phase", lambda: software.count("blocked") == 1)
    return found, handle


def last_phase(client: ronde.Client) -> str:
    return "ncclAllGather" if client.cross_size > 1 else "ncclAllReduce"


def shut_down(client: ronde.Client) -> None:
    """Rank 0 closes its client when it has its result, of which rank 1 has not seen the end: rank 1 gets it, too."""
    reduced(client, "first")
    if client.rank == 1:
        found, handle = in_last_phase(client, "second")
        waiting = array(client)
        third = client.allreduce_async(waiting, ronde.Sum, "third", out=waiting)
        # The thread calls NCCL, and is late to see the end.
        software.block("cuEventRecord", True)
        software.block(last_phase(client), False)
        software.eventually("rank 0 has shut down", lambda: not client.is_open)
        software.block("cuEventRecord", False)
        print(f"third: {failure(functools.partial(third.wait, 50))}", flush=True)
    else:
        found = array(client)
        handle = client.allreduce_async(found, ronde.Sum, "second", out=found)
    handle.wait(50)
    total = sum(range(1, client.size + 1))
    numpy.testing.assert_array_equal(found.read(), numpy.full(1000, total, "float32"))
    print("second: it has the result", flush=True)
    if client.rank != 0:
        software.eventually("rank 0 has shut down", lambda: not client.is_open)
    client.close()


def shut_down_early(client: ronde.Client) -> None:
    """Rank 0 closes its client before it calls NCCL: the ranks of its host get the reason, and do not hang."""
    reduced(client, "first")
    last = last_phase(client)
    if client.rank == 0:
        _, handle = in_last_phase(client, "second")
        client.close()
        # So that NCCL enqueues nothing, when the call goes on.
        software.fail(last, 3, 1)
        software.block(last, False)
        failure(functools.partial(handle.wait, 50))
    else:
        found = array(client)
        handle = client.allreduce_async(found, ronde.Sum, "second", out=found)
        if client.cross_rank == 0:
            print(f"second: {failure(functools.partial(handle.wait, 50))}", flush=True)
        else:
            handle.wait(50)
            software.eventually("rank 0 has shut down", lambda: not client.is_open)
        client.close()
    software.eventually("communicators are ended", lambda: software.count("communicators") == 0)
    print("the session is closed", flush=True)


def unable(client: ronde.Client) -> None:
    """A rank cannot use NCCL: with `2` each operation fails by that reason; with `auto` there is one level."""
    found = array(client, 1 << 19)
    if os.environ["RONDE_GPU_LEVELS"] == "2":
        for name in ("first", "second"):
            error = failure(functools.partial(client.allreduce, found, ronde.Sum, name, out=found))
            print(f"{error.cause}: {error}", flush=True)
    else:
        client.allreduce(found, ronde.Sum, out=found)
        assert client.gpu_levels[:2] == (0, 1), client.gpu_levels
    software.close(client)
    print("the session is closed", flush=True)


def other_device(client: ronde.Client) -> None:
    """A rank gives a tensor on another GPU than before: that operation has one level on all ranks."""
    reduced(client, "first")
    if client.rank == 0:
        software.use(client.local_size)
    reduced(client, "second")
    software.use(client.local_rank)
    reduced(client, "third")
    assert client.gpu_levels[:2] == (2, 1), client.gpu_levels
    software.close(client)
    print("the session is closed", flush=True)


def main() -> None:
    case = sys.argv[1]
    # The sidecar's notices about missing ranks.
    logging.basicConfig(stream=sys.stdout)
    client = ronde.connect(operation_timeout=60)
    same = case == "unable" and os.environ.get("SAME_GPU")
    software.use(0 if same else client.local_rank)
    globals()[case](client)


if __name__ == "__main__":
    main()
