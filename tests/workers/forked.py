"""A rank that forks, as a DataLoader does. It uses the protocol of tests/src/script.rs."""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy
import ronde


def report(answer: str, **fields: object) -> None:
    """Prints one answer."""
    print(json.dumps({"answer": answer, **fields}), flush=True)


def use(client: ronde.Client) -> int:
    """The exit status of a child that uses its parent's session."""
    try:
        client.allreduce(numpy.ones(1000, numpy.float32), op=ronde.Sum, name="by a child")
    except ronde.RondeError as error:
        return 0 if "used after fork" in str(error) else 8
    return 9


client = ronde.connect()
report("connected", rank=client.rank, size=client.size)
# Once the ranks are in step, a child is born while an operation is in flight, tries to use the session and ends.
client.barrier("start")
handle = client.allreduce_async(numpy.ones(1000, numpy.float32), op=ronde.Sum, name="in flight")
child = os.fork()
if child == 0:
    os._exit(use(client))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
report("notice", text=f"a child ended with status {status}")
numpy.testing.assert_array_equal(handle.wait(), client.size)
# Another one stays.
child = os.fork()
if child == 0:
    signal.pause()
report("notice", text=f"a child stays: {child}")
sys.stdin.read()
