"""Run by two ranks on a software device: rank 1 is killed while its tensor is on its way to the host."""

from __future__ import annotations

import os
import signal
import time

import numpy
import software

import ronde


def main() -> None:
    # The launcher ends all ranks 1 s after one has died; those that are left print what they have received.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client = ronde.connect(operation_timeout=60)
    software.use()
    stream = software.Stream()
    array = software.DeviceArray(numpy.ones(1 << 20, "float32"), stream)
    client.allreduce(array, ronde.Sum, "first", out=array)
    if client.rank == 1:
        stream.hold(True)
    handle = client.allreduce_async(array, ronde.Sum, "second", out=array)
    client.barrier()
    if client.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        handle.wait(50)
    except ronde.PeerLostError as error:
        assert error.rank == 1, error
        print(f"rank 1 is lost, reported after {time.monotonic() - start:.1f} s", flush=True)
    else:
        raise AssertionError("rank 1 is gone")
    # What this rank's copy used is released with the session, and the session ends.
    del handle
    client.close()
    print("the session is closed", flush=True)


if __name__ == "__main__":
    main()
