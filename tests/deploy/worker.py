"""A worker of the tests: all-reduces, prints what it got as JSON, and fails where it is asked to.

python worker.py [--fail-rank RANK] [--elements N] [--linger SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import numpy as np
import ronde


def main() -> int:
    """Works; returns the process's exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-rank", type=int)
    parser.add_argument("--elements", type=int, default=100_000)
    parser.add_argument("--linger", type=float, default=0.0, help="how long rank 1 works alone at the end")
    asked = parser.parse_args()
    with ronde.connect() as client:
        for step in range(3):
            mine = np.full(asked.elements, client.rank + step + 1, np.float32)
            total = client.allreduce(mine, name="total", op=ronde.Sum)
            expected = sum(rank + step + 1 for rank in range(client.size))
            assert np.all(total == expected), (client.rank, step, total[:4], expected)
        if client.rank == asked.fail_rank:
            os._exit(7)
        if asked.fail_rank is not None:
            client.allreduce(mine, name="never", op=ronde.Sum)
        seen = {"rank": client.rank, "size": client.size, "local_rank": client.local_rank, "uid": os.getuid()}
        # One write: lines of several processes do not mix.
        os.write(1, (json.dumps({**seen, "total": float(total[0])}) + "\n").encode())
        if client.rank == 1:
            time.sleep(asked.linger)
    return 0


if __name__ == "__main__":
    sys.exit(main())
