"""Run by every rank; the sidecar's second operation fails on the device: every rank gets an error that names it.

Without an argument a group of NCCL's calls fails; with `hosts` one of its calls; with `copied` the copy of a
contribution to the host, beside another.
"""

from __future__ import annotations

import sys

import numpy
import software

import ronde


def main() -> None:
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    is_copied = "copied" in sys.argv
    # A maximum of floating-point numbers is copied to the host.
    op, function = (ronde.Max, "cuMemcpyAsync") if is_copied else (ronde.Sum, "ncclGroupEnd")
    if "hosts" in sys.argv:
        function = "a collective of NCCL failed with ncclInternalError"
    content = numpy.ones(10_000, "float32")
    array = software.DeviceArray(content, software.Stream())
    client.allreduce(array, op, "first", out=array)
    try:
        client.allreduce(array, op, "second", out=array)
    except ronde.RondeError as error:
        assert function in str(error), error
        print("the failure of the device is reported", flush=True)
    else:
        raise AssertionError("it has succeeded")
    client.close()


if __name__ == "__main__":
    main()
