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
    # The launcher ends all ranks 1 s after one has died; those that are left print what they have received.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    stream = software.Stream()
    content = numpy.arange(100_000, dtype="float32") % 7
    array, out = software.DeviceArray(content, stream), software.DeviceArray(content, stream)
    client.allreduce(array, ronde.Sum, "first", out=out)
    numpy.testing.assert_array_equal(out.read(), content * client.size)
    last = client.size - 1
    if client.rank == last:
        # The others have submitted theirs: a submission raises once the session is over. A message waits for NCCL, too,
        # so this rank submits its own, with which NCCL begins, after it has received those messages.
        for rank in range(last):
            client.recv(rank)
    handles = [client.allreduce_async(array, ronde.Sum, f"next.{at}", out=out) for at in range(3)]
    if client.rank == last:
        software.eventually("an operation is in flight", lambda: page()["in_flight"] > 0)
        print(f"killed at {time.monotonic()}", flush=True)
        os.kill(process() if what == "sidecar" else os.getpid(), signal.SIGKILL)
    else:
        # Not waited for: the last rank may have received it, and be dead before this rank's sidecar knows.
        ready = client.send_async(numpy.ones(1, "int8"), last)
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
    if client.rank != last:
        del ready
    client.close()
    print("the session is closed", flush=True)


if __name__ == "__main__":
    main()
