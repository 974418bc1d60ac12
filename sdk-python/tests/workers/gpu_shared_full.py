"""Run by every rank: all-reduces on a device that has no memory to share, whose results are right all the same."""

from __future__ import annotations

import numpy
import software

import ronde


def main() -> None:
    """Reduces three tensors."""
    with ronde.connect() as client:
        software.use(client.local_rank)
        stream = software.Stream()
        for number in range(3):
            mine = numpy.arange(65_536, dtype="float32") + client.rank + number
            tensor = software.DeviceArray(mine, stream)
            client.allreduce(tensor, ronde.Sum, name=f"tensor.{number}", out=tensor)
            expected = sum(numpy.arange(65_536, dtype="float32") + rank + number for rank in range(client.size))
            numpy.testing.assert_array_equal(tensor.read(), expected)
        print("copied instead")


if __name__ == "__main__":
    main()
