"""Runs a job of 8 workers on 4 hosts under random faults, and checks every element of every result.

    python -m soak [--seconds 1200] [--kinds N] [--seed N] [--only FAULT] [--hosts 4] [--ranks-per-host 2]

Ends with a table. The exit status is 1 when there was a hang, a wrong element or a wrong culprit, or when a sidecar's
memory or descriptors have grown. Needs root, for the network namespaces of the hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from soak import trap
from soak.faults import FAULTS
from soak.network import Network
from soak.processes import Job, faketime
from soak.supervisor import Supervisor
from soak.table import has_grown, table

LOG_MB = 4
# Without faults, at the beginning.
QUIET_S = 5.0
BETWEEN_S = 2.0
# After the time is up, for the kinds of faults that have not come yet.
OVERTIME_S = 240.0
STOPPED_S = 60.0


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--kinds", type=int, default=0, help="of faults that come even if that takes longer")
    parser.add_argument("--seed", type=int, default=None, help="of the order of faults; drawn and printed without it")
    parser.add_argument("--only", choices=sorted(FAULTS), action="append", help="a fault, instead of all")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.SystemRandom().getrandbits(32)
    why_not = Network.why_not()
    if why_not is not None:
        raise SystemExit(f"soak needs hosts as network namespaces: {why_not}")
    if faketime() is None:
        print("libfaketime is not installed: clocks are not moved", flush=True)
    print(f"soak: {given.seconds:.0f} s, seed {seed}", flush=True)
    with _folder(given.hosts) as folder, contextlib.closing(Network(given.hosts, folder)) as network:
        job = Job(network, _binary(), folder, given.ranks_per_host)
        _prepare(job)
        supervisor = Supervisor(job, random.Random(seed), given.only or list(FAULTS))
        try:
            began = time.monotonic()
            _run(supervisor, given.seconds, given.kinds)
            text, is_good = table(supervisor, time.monotonic() - began), _is_good(supervisor)
        finally:
            job.end()
            _keep_logs(folder)
    print(text)
    return 0 if is_good else 1


def _run(supervisor: Supervisor, seconds: float, kinds: int) -> None:
    """Faults until the time is up and enough kinds have come, then the end that all ranks agree on."""
    job, began = supervisor.job, time.monotonic()
    job.start()
    if not supervisor.await_progress(began, "start"):
        return
    time.sleep(QUIET_S)
    while time.monotonic() - began < seconds + (OVERTIME_S if len(supervisor.tally.faults) < kinds else 0.0):
        supervisor.note_usage()
        name, faults_began = supervisor.inject(), time.monotonic()
        time.sleep(max(0.0, BETWEEN_S - (time.monotonic() - faults_began)))
        _progress(supervisor, name, seconds - (time.monotonic() - began))
    supervisor.note_usage()
    supervisor.check_nobody_failed("after the faults", time.monotonic() - BETWEEN_S)
    job.stop_file.touch()
    for rank, worker in enumerate(job.workers):
        try:
            worker.wait_for(lambda line: "stopped" in line, STOPPED_S)
        except TimeoutError as error:
            supervisor.tally.hangs.append(f"stop of rank {rank}: {error}")
    supervisor.collect()


def _progress(supervisor: Supervisor, name: str, left: float) -> None:
    totals, tally = supervisor.totals(), supervisor.tally
    bad = f"{len(tally.hangs)} hangs, {totals['wrong']} wrong elements, {len(tally.wrong_culprits)} wrong culprits"
    faults = sum(tally.faults.values())
    print(
        f"{max(0.0, left):5.0f} s left: {totals['operations']} operations, {faults} faults ({name}), {bad}", flush=True
    )
    for text in supervisor.new_events():
        print(f"    {text}", flush=True)


def _is_good(supervisor: Supervisor) -> bool:
    tally = supervisor.tally
    is_clean = not (tally.hangs or tally.wrong_culprits or tally.wrong_elements or supervisor.totals()["wrong"])
    return is_clean and bool(supervisor.totals()["operations"]) and not has_grown(supervisor)


def _prepare(job: Job) -> None:
    """Certificates and the plugin that traps."""
    certs, authority = str(job.folder / "certs"), str(job.folder / "authority")
    for command in (
        ["init", "--job", "soak", authority],
        ["issue", "--authority", authority, "--sidecars", f"0-{job.network.hosts - 1}", certs],
    ):
        subprocess.run([job.binary, "certs", *command], check=True, stdout=subprocess.DEVNULL)
    (job.folder / "trap.wasm").write_bytes(trap.module())


@contextlib.contextmanager
def _folder(hosts: int) -> Iterator[pathlib.Path]:
    """A folder with a small file system for each host."""
    with tempfile.TemporaryDirectory(prefix="ronde-soak-") as name:
        folder, mounted = pathlib.Path(name), []
        try:
            for host in range(hosts):
                mount = folder / "logs" / str(host)
                mount.mkdir(parents=True)
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={LOG_MB}m", "soak", str(mount)], check=True)
                mounted.append(mount)
            yield folder
        finally:
            for mount in mounted:
                subprocess.run(["umount", str(mount)], check=False)


def _keep_logs(folder: pathlib.Path) -> None:
    """Copies logs to RONDE_SOAK_LOGS, where that is set."""
    kept = os.environ.get("RONDE_SOAK_LOGS")
    if not kept:
        return
    for log in [*folder.glob("logs/*/sidecar.log"), *folder.glob("worker-*.log")]:
        target = pathlib.Path(kept) / str(log.relative_to(folder)).replace("/", "-")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, target)


def _binary() -> str:
    binary = os.environ.get("RONDE_BIN") or shutil.which("ronde")
    if binary is None:
        raise SystemExit("ronde is not built: run `make build`, or set RONDE_BIN to the binary")
    return binary


if __name__ == "__main__":
    sys.exit(main())
