"""Run by every rank: more tensors are copied through the host at the same time than its memory for that."""

from __future__ import annotations

import numpy
import software

import ronde

ELEMENTS = 1 << 21  # 8 MiB
COUNT = 7


def main() -> None:
    client = ronde.connect(operation_timeout=120)
    ordinal = client.local_rank
    software.use(ordinal)
    stream = software.Stream()
    whole = client.empty(ELEMENTS, "float32", device=ordinal)
    mine = software.View(whole, 0, (ELEMENTS,), stream)
    mine.write(numpy.full(ELEMENTS, client.rank + 1, "float32"))
    targets = [software.DeviceArray(numpy.zeros(ELEMENTS, "float32"), stream) for _ in range(COUNT)]
    # A maximum of floating-point numbers is copied to the host. The contribution is that of all of them.
    handles = [client.allreduce_async(mine, ronde.Max, f"many.{at}", out=out) for at, out in enumerate(targets)]
    for handle in handles:
        handle.wait()
    for target in targets:
        assert (target.read() == client.size).all(), target.read()
    client.close()
    print("all were copied")


if __name__ == "__main__":
    main()
