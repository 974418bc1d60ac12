"""Run by ranks whose sidecar uses the GPUs: the last one is killed, and the others hear it and go on with right data.

Its neighbours' tensors stay as they are.
"""

from __future__ import annotations

import os
import signal

import numpy
import software

import ronde


def main() -> None:
    # The launcher ends all ranks 1 s after one has died; those that are left print what they have received.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    stream = software.Stream()
    content = numpy.arange(100_000, dtype="float32") % 7
    array = software.DeviceArray(content, stream)
    out = software.DeviceArray(content, stream)
    client.allreduce(array, ronde.Sum, "first", out=out)
    numpy.testing.assert_array_equal(out.read(), content * client.size)
    last = client.size - 1
    if client.rank == last:
        # The others have submitted all of theirs: a submission raises once the session is over.
        for rank in range(last):
            client.recv(rank)
    handles = [client.allreduce_async(array, ronde.Sum, f"second.{at}", out=out) for at in range(4)]
    if client.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    third = client.allreduce_async(array, ronde.Sum, "third", out=out)
    # Not waited for: the last rank may have received it, and be dead before the sidecar knows.
    ready = client.send_async(numpy.ones(1, "int8"), last)
    try:
        third.wait(50)
    except ronde.PeerLostError as error:
        assert error.rank == last, error
        print("the lost rank was reported", flush=True)
    else:
        raise AssertionError("a rank is gone")
    numpy.testing.assert_array_equal(array.read(), content)
    del handles, third, ready
    client.close()
    print("the session is closed", flush=True)


if __name__ == "__main__":
    main()
