"""Run by every rank: forked children, signals and threads."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

import numpy

import ronde


def check_fork(client: ronde.Client) -> None:
    """A child cannot use the session; its end and its drops leave the parent's alone."""
    handle = client.allreduce_async(numpy.ones(3), op=ronde.Sum, name="before fork")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (client.barrier, handle.wait, lambda: client.allreduce(numpy.ones(1))):
                try:
                    call()
                except ronde.RondeError as error:
                    assert error.cause == "used_after_fork", error.cause
                else:
                    raise AssertionError("a child used its parent's session")
            del handle
            client.close()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    numpy.testing.assert_array_equal(handle.wait(), client.size)


def check_interrupt(client: ronde.Client) -> None:
    """Ctrl-C ends a wait; the operation can still be waited for."""
    handle = client.allreduce_async(numpy.ones(3), op=ronde.Sum, name=f"only rank {client.rank} so far")
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()  # in here, as the signal may come before the wait
        handle.wait()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the wait was not interrupted")
    timer.join()
    try:
        handle.wait(timeout=0.01)
    except TimeoutError:
        pass
    else:
        raise AssertionError("nobody else submitted it")
    client.barrier("all ranks were interrupted")
    handles = [
        client.allreduce_async(numpy.ones(3), op=ronde.Sum, name=f"only rank {rank} so far")
        for rank in range(client.size)
        if rank != client.rank
    ]
    for each in [handle, *handles]:
        numpy.testing.assert_array_equal(each.wait(), client.size)


def check_threads(client: ronde.Client) -> None:
    """Threads share a client."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(20):
                result = client.allreduce(numpy.full(1000, number), op=ronde.Sum, name=f"thread {number} step {step}")
                numpy.testing.assert_array_equal(result, number * client.size)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def main() -> None:
    """Everything, on one session."""
    with ronde.connect() as client:
        check_fork(client)
        if client.size > 1:
            check_interrupt(client)
        check_threads(client)
        client.barrier()
        print(f"rank {client.rank}: forks, signals and threads are fine", flush=True)
        client.barrier("end")


if __name__ == "__main__":
    main()
