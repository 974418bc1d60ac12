"""A line that delays and loses packets, between a container and its bridge.

The kernel's own (netem) is a module that many machines of tests lack. So the container's end on this machine is taken
off the bridge, and a thread carries frames between it and a pair of interfaces whose other end is on the bridge.
"""

from __future__ import annotations

import collections
import contextlib
import random
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

from project import SIDECARS, Project

# Of <linux/if_ether.h> and <linux/if_packet.h>.
ETH_P_ALL, PACKET_OUTGOING = 3, 4
FRAME_BYTES_MAX = 65_536
# Where the thread checks whether it must end.
POLL_S = 0.2


class SlowLine:
    """Carries frames between two interfaces, each way with the same delay and the same share of losses."""

    def __init__(self, ends: tuple[str, str], delay_s: float, loss: float) -> None:
        self.lost = 0
        self._delay_s, self._loss = delay_s, loss
        self._chance = random.Random(1)
        self._sockets = [bound(name) for name in ends]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join()
        for each in self._sockets:
            each.close()

    def _carry(self) -> None:
        # All wait for the same time, so that the first that came is the first to go.
        waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
        while not self._stopped.is_set():
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else POLL_S
            readable, _, _ = select.select(self._sockets, [], [], min(pause, POLL_S))
            for source in readable:
                frame, (_, _, kind, *_) = source.recvfrom(FRAME_BYTES_MAX)
                if kind == PACKET_OUTGOING:
                    continue
                if self._chance.random() < self._loss:
                    self.lost += 1
                    continue
                target = self._sockets[1 - self._sockets.index(source)]
                waiting.append((time.monotonic() + self._delay_s, target, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, target, frame = waiting.popleft()
                # A full queue is one more loss.
                with contextlib.suppress(OSError):
                    target.send(frame)


def bound(interface: str) -> socket.socket:
    """A socket for all frames of an interface."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    made.bind((interface, 0))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    return made


@contextlib.contextmanager
def worsened(job: Project, service: str, delay_s: float, loss: float) -> Iterator[SlowLine]:
    """Makes the line between a container and the network `ring` a bad one; restores it after the context."""
    for sidecar in SIDECARS:
        # Each packet from a container must be separate and have its checksum, as on a wire.
        off = ["tx", "off", "tso", "off", "gso", "off", "gro", "off"]
        job.within(sidecar, "ethtool", "--offload", job.interface(sidecar), *off)
    # `eth0@if7`: the other end is number 7 on this machine.
    shown = job.within(service, "ip", "-o", "link", "show", "dev", job.interface(service))
    peer = re.search(r"@if(\d+):", shown)
    assert peer, shown
    listed = ip("-o", "link", "show").splitlines()
    end = next(line.split(": ")[1].split("@")[0] for line in listed if line.startswith(f"{peer[1]}: "))
    inner, outer = f"{end[:11]}-in", f"{end[:10]}-out"
    ip("link", "add", inner, "type", "veth", "peer", "name", outer)
    line = None
    try:
        ip("link", "set", end, "nomaster")
        ip("link", "set", outer, "master", job.bridge())
        for name in (inner, outer):
            ip("link", "set", name, "up")
        line = SlowLine((end, inner), delay_s, loss)
        yield line
    finally:
        if line is not None:
            line.stop()
        ip("link", "delete", inner)
        ip("link", "set", end, "master", job.bridge())


def ip(*words: str) -> str:
    """The output of `ip` on this machine; it must succeed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
