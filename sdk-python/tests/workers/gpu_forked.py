"""Run by one rank on a software device: a forked child cannot use its parent's device, and does not harm it."""

from __future__ import annotations

import os

import numpy
import software

import ronde
from ronde import _ronde


def in_child(array: software.DeviceArray) -> int:
    """What the child does; 0 if it was refused."""
    try:
        _ronde.gpu_of(array.address)
    except ronde.RondeError as error:
        return 0 if "cannot be used after fork" in str(error) else 2
    return 3


def main() -> None:
    client = ronde.connect()
    software.use()
    array = software.DeviceArray(numpy.ones(100_000, "float32"), software.Stream())
    handle = client.allreduce_async(array, ronde.Sum, out=array)
    contexts = software.count("contexts")
    if (child := os.fork()) == 0:
        status = 1
        try:
            del handle
            status = in_child(array)
            if software.count("contexts") != contexts:
                status = 4
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
    handle.wait()
    assert (array.read() == client.size).all()
    client.close()
    print("the child was refused")


if __name__ == "__main__":
    main()
