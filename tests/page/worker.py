"""A worker of the page's tests: sums until a file `end` appears; its last rank stands still while there is one `stop`.

python worker.py FOLDER
"""

from __future__ import annotations

import pathlib
import sys
import time

import numpy as np
import ronde

# A name that would be an element and a script if the page took it for markup.
NAME = "<img src=x onerror=document.title='taken'>"


def main() -> None:
    """Sums until told to end."""
    folder = pathlib.Path(sys.argv[1])
    ones = np.ones(100_000, dtype=np.float32)
    with ronde.connect() as client:
        for step in range(1_000_000):
            while client.rank == client.size - 1 and (folder / "stop").exists():
                time.sleep(0.05)
            # All ranks must end at the same step: rank 0 decides. A name that changes is negotiated each time.
            ends = np.array([float(client.rank == 0 and (folder / "end").exists())])
            if client.allreduce(ends, op=ronde.Sum, name=f"{NAME}{step}")[0]:
                return
            client.allreduce(ones, op=ronde.Sum, name="weights")
            time.sleep(0.01)


if __name__ == "__main__":
    main()
