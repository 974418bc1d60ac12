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
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    stream = software.Stream()
    content = numpy.arange(100_000, dtype="float32") % 7
    array = software.DeviceArray(content, stream)
    out = software.DeviceArray(content, stream)
    client.allreduce(array, ronde.Sum, "first", out=out)
    numpy.testing.assert_array_equal(out.read(), content * client.size)
    handles = [client.allreduce_async(array, ronde.Sum, f"second.{at}", out=out) for at in range(4)]
    if client.rank == client.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    last = client.allreduce_async(array, ronde.Sum, "third", out=out)
    try:
        last.wait(50)
    except ronde.PeerLostError as error:
        assert error.rank == client.size - 1, error
        print("the lost rank was reported", flush=True)
    else:
        raise AssertionError("a rank is gone")
    numpy.testing.assert_array_equal(array.read(), content)
    del handles, last
    client.close()
    print("the session is closed", flush=True)


if __name__ == "__main__":
    main()
