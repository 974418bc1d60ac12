"""Run by every rank of a job whose sidecars use their GPUs: the last worker or its sidecar is killed while NCCL works.

The argument names which. On each host a kernel of NCCL waits for ever then (RONDE_DEVICE_FAIL of the sidecars). The
ranks that are left get the reason, and a sidecar whose workers are left aborts its communicators.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy
import software
from own_sidecar import page, process

import ronde


def main() -> None:
    what = sys.argv[1]
    if what == "sidecar":
        # By which the launcher ends all ranks then.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    stream = software.Stream()
    content = numpy.arange(100_000, dtype="float32") % 7
    array, out = software.DeviceArray(content, stream), software.DeviceArray(content, stream)
    client.allreduce(array, ronde.Sum, "first", out=out)
    numpy.testing.assert_array_equal(out.read(), content * client.size)
    handles = [client.allreduce_async(array, ronde.Sum, f"next.{at}", out=out) for at in range(3)]
    last = client.size - 1
    if client.rank == last:
        software.eventually("an operation is in flight", lambda: page()["in_flight"] > 0)
        print(f"killed at {time.monotonic()}", flush=True)
        os.kill(process() if what == "sidecar" else os.getpid(), signal.SIGKILL)
    for handle in handles:
        try:
            handle.wait(50)
        except ronde.RondeError as error:
            if handle is handles[0]:
                print(f"reported at {time.monotonic()}", flush=True)
            # A rank beside the sidecar that was killed has lost that, so it cannot name a rank.
            if what == "sidecar" and client.cross_rank == 1:
                continue
            assert isinstance(error, ronde.PeerLostError), error
            assert what == "sidecar" or error.rank == last, error
        else:
            raise AssertionError("a rank is gone")
    if what == "worker":
        print(f"rank {last} is lost", flush=True)
    numpy.testing.assert_array_equal(array.read(), content)
    if what == "worker" and client.cross_rank == 0:
        software.eventually("the communicators are aborted", lambda: page()["gpu"]["aborted"] == 1)
        print("communicators are aborted", flush=True)
    client.close()
    print("the session is closed", flush=True)


if __name__ == "__main__":
    main()
