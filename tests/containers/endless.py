"""The script of workers in tests with containers: steps until they are stopped, every result checked.

Prints `step N` and how long it took, every notice with its time, and at the end one line of JSON: `ended` with the
number of steps, or `failed` with the time and the error's words.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time

import numpy as np
import ronde

# A pattern of bits that a capture of the network can be searched for.
MARK = np.float32(1.2345678)
ELEMENTS = 250_000
NAME = "marked-tensor"


def main() -> int:
    """Runs the steps; returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True, help="how many to do")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two steps")
    options = parser.parse_args()
    logging.basicConfig(format="notice %(created).3f %(message)s", level=logging.WARNING, stream=sys.stdout)
    done = 0
    try:
        with ronde.connect() as client:
            tensor = np.full(ELEMENTS, MARK)
            expected = np.sum([MARK] * client.size, dtype=np.float32)
            for done in range(1, options.steps + 1):
                start = time.monotonic()
                result = client.allreduce(tensor, op=ronde.Sum, name=NAME)
                if not np.all(result == expected):
                    print(f"step {done}: a wrong result: {result[result != expected][:3]}, not {expected}", flush=True)
                    return 2
                print(f"step {done} in {time.monotonic() - start:.3f} s", flush=True)
                time.sleep(options.pause)
    except ronde.RondeError as error:
        print(json.dumps({"failed": time.time(), "steps": done, "error": str(error)}), flush=True)
        return 1
    print(json.dumps({"ended": time.time(), "steps": done}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
