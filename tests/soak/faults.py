"""Faults: what fails, for how long, and the culprit that failures must name."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Callable, Union

from soak.processes import Job

STOPPED_S = CUT_S = 3.0
# Of faults that only make things slow.
BAD_S = 5.0
HOUR_S = 3_600


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The cause of the end of an epoch: a rank, or the sidecar of a host with all its ranks."""

    rank: int | None = None
    sidecar: int | None = None


@dataclasses.dataclass(frozen=True)
class Excuse:
    """A reason for which a sidecar or one of its ranks may have to fail, and which the failure must name."""

    sidecar: int
    texts: tuple[str, ...]


Expected = Union[Culprit, Excuse, None]
Inject = Callable[[Job, random.Random], "contextlib.AbstractContextManager[Expected]"]
FAULTS: dict[str, Inject] = {}


def fault(name: str) -> Callable[[Callable[[Job, random.Random], Iterator[Expected]]], Inject]:
    """Registers a fault: a generator that yields while the fault lasts, and repairs it then."""

    def register(function: Callable[[Job, random.Random], Iterator[Expected]]) -> Inject:
        FAULTS[name] = contextlib.contextmanager(function)
        return FAULTS[name]

    return register


@fault("worker killed")
def kill_worker(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Kills a worker: its epoch ends, and it is restarted."""
    rank = rng.randrange(len(job.workers))
    job.workers[rank].signal(signal.SIGKILL)
    yield Culprit(rank=rank)
    job.replace_worker(rank)


@fault("sidecar killed")
def kill_sidecar(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Kills a sidecar: its job ends, and another one is started."""
    host = rng.randrange(len(job.sidecars))
    job.sidecars[host].signal(signal.SIGKILL)
    yield Culprit(sidecar=host)
    job.start_again()


@fault("sidecar stopped for 3 s")
def stop_sidecar(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Stops a sidecar for less than the peer timeout."""
    process = rng.choice(job.sidecars)
    process.signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    process.signal(signal.SIGCONT)
    yield None


@fault("link cut for 3 s")
def cut_link(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Cuts the link of a host for less than the peer timeout."""
    with job.network.cut(rng.randrange(job.network.hosts)):
        time.sleep(CUT_S)
    yield None


@fault("1 % loss")
def lose(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Loses a part of the packets of a host, in both directions."""
    with job.network.worsened(rng.randrange(job.network.hosts), lost=0.01):
        time.sleep(BAD_S)
    yield None


@fault("20 ms delay and reordering")
def delay(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Delays the packets of a host, in both directions; a quarter of them overtakes the others."""
    with job.network.worsened(rng.randrange(job.network.hosts), delay_s=0.02, reordered=0.25):
        time.sleep(BAD_S)
    yield None


@fault("disk full")
def fill_disk(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Fills the disk with the log and the cache of a sidecar."""
    path = job.logs(rng.randrange(job.network.hosts)) / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 65_536):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    time.sleep(BAD_S)
    path.unlink()
    yield None


@fault("descriptors exhausted")
def exhaust_descriptors(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Limits the file descriptors of a sidecar to those in use.

    A worker that needs another segment then is refused; a sidecar that needs one for results ends the epoch.
    """
    host = rng.randrange(len(job.sidecars))
    pid = job.sidecars[host].pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, before[1]))
    time.sleep(BAD_S)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    yield Excuse(host, ("too many files open", "Too many open files"))


@fault("clock moved by an hour")
def move_clock(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Moves the clock of one sidecar forward or back, and then to the right time."""
    clock = job.clock(rng.randrange(job.network.hosts))
    clock.write_text(f"{rng.choice((HOUR_S, -HOUR_S)):+d}\n")
    time.sleep(BAD_S)
    clock.write_text("+0\n")
    yield None


@fault("certificates rotated")
def rotate_certificates(job: Job, rng: random.Random) -> Iterator[Expected]:
    """Rotates the certificates of all sidecars; connections are replaced while operations run."""
    directories = [str(job.folder / f"certs/sidecar-{host}") for host in range(job.network.hosts)]
    command = [job.binary, "certs", "rotate", "--authority", str(job.folder / "authority"), *directories]
    subprocess.run(command, check=True, capture_output=True)
    time.sleep(BAD_S)
    yield None
