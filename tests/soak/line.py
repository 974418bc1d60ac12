"""A line that delays, reorders and loses frames between two interfaces; run in their network namespace until its end.

    python -m soak.line IN OUT DELAY_S REORDERED LOST

DELAY_S   -- by which frames are late
REORDERED -- the share of frames that are not, so that they overtake others
LOST      -- the share of frames that are dropped

The kernel's own (netem) is a module that many machines lack. Prints "ready" when it carries frames.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import select
import socket
import sys
import time

# Of <linux/if_ether.h> and <linux/if_packet.h>.
ETH_P_ALL, PACKET_OUTGOING = 3, 4
FRAME_BYTES_MAX = 65_536
QUEUE_BYTES = 8 << 20
POLL_S = 1.0


def main() -> None:
    """Carries frames both ways until the process is killed."""
    ends = [_bound(name) for name in sys.argv[1:3]]
    delay_s, reordered, lost = map(float, sys.argv[3:6])
    chance, number = random.Random(1), 0
    waiting: list[tuple[float, int, int, bytes]] = []
    print("ready", flush=True)
    while True:
        pause = min(POLL_S, max(0.0, waiting[0][0] - time.monotonic())) if waiting else POLL_S
        readable, _, _ = select.select(ends, [], [], pause)
        for source in readable:
            frame, (_, _, kind, *_) = source.recvfrom(FRAME_BYTES_MAX)
            if kind == PACKET_OUTGOING or chance.random() < lost:
                continue
            late = 0.0 if chance.random() < reordered else delay_s
            number += 1
            heapq.heappush(waiting, (time.monotonic() + late, number, 1 - ends.index(source), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            # A full queue is one more loss.
            with contextlib.suppress(OSError):
                ends[target].send(frame)


def _bound(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    made.bind((interface, 0))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE_BYTES)
    return made


if __name__ == "__main__":
    main()
