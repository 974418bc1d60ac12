"""Run by every rank on a software device: a second session, as after a reset of an elastic job, makes communicators."""

from __future__ import annotations

import numpy
import software

import ronde


def session(number: int) -> None:
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    found = software.DeviceArray(numpy.full(100, client.rank + number, "float32"), software.Stream())
    handles = [client.allreduce_async(found, ronde.Sum, f"{at}", out=found) for at in range(3)]
    handles[0].wait()
    client.barrier()
    del handles  # some are in flight at the end
    assert client.gpu_levels.operations >= 1, client.gpu_levels
    client.close()
    software.eventually("communicators are ended", lambda: software.count("communicators") == 0)


def main() -> None:
    session(1)
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    found = software.DeviceArray(numpy.full(100, client.rank + 1, "float32"), software.Stream())
    client.allreduce(found, ronde.Sum, out=found)
    numpy.testing.assert_array_equal(found.read(), numpy.full(100, 3, "float32"))
    assert software.count("communicators") == 1
    software.close(client)
    print("two sessions hold")


if __name__ == "__main__":
    main()
