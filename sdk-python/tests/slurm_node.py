"""A Slurm of one node on this host, for tests: munged, slurmctld and slurmd with a configuration of their own.

They listen on the loopback alone. Requires root, as slurmd starts processes of any user.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING

import pytest
from conftest import leave_out

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
READY_TIMEOUT_S = 60
STOP_TIMEOUT_S = 10
CONFIGURATION = """
ClusterName=ronde-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=512 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
"""


def _path(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin")


def why_not() -> str | None:
    """Returns why Slurm cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    missing = [name for name in NEEDED if _path(name) is None]
    return f"{', '.join(missing)} not installed; `make deploy-test` installs Slurm" if missing else None


@contextlib.contextmanager
def slurm_node() -> Iterator[dict[str, str]]:
    """Starts the daemons. Yields the variables by which srun finds them. Skips where Slurm cannot run."""
    if reason := why_not():
        leave_out("slurm", reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as place, contextlib.ExitStack() as daemons:
        folder = pathlib.Path(place)
        folder.chmod(0o755)
        _configure(folder)
        key = folder / "munge.key"
        options = [f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
        options += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed", "--foreground", "--force"]
        daemons.enter_context(_daemon(folder, ["munged", *options]))
        _wait(folder, (folder / "munge.socket").exists, "munged")
        configuration = f"{folder}/slurm.conf"
        daemons.enter_context(_daemon(folder, ["slurmctld", "-D", "-f", configuration]))
        daemons.enter_context(_daemon(folder, ["slurmd", "-D", "-f", configuration]))
        variables = {"SLURM_CONF": configuration}
        _wait(folder, lambda: _is_idle(variables), "the node")
        yield variables


def _configure(folder: pathlib.Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    host = socket.gethostname().partition(".")[0]
    ports = dict(zip(("controller_port", "node_port"), _free_ports(2)))
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, host=host, **ports))
    # Tests set no limits, and a container may have no control groups to write. Older releases do not know "disabled",
    # and touch those of the first version only for limits.
    (folder / "cgroup.conf").write_text(f"CgroupPlugin={'disabled' if _release() >= 23 else 'cgroup/v1'}\n")


def _release() -> int:
    """Returns the year in Slurm's version, such as 22 of 22.05.8."""
    done = subprocess.run([str(_path("slurmd")), "-V"], capture_output=True, text=True, timeout=30, check=True)
    return int(done.stdout.split()[-1].partition(".")[0])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in opened]


@contextlib.contextmanager
def _daemon(folder: pathlib.Path, command: list[str]) -> Iterator[None]:
    path = _path(command[0])
    assert path is not None  # `why_not` has checked
    with (folder / f"{command[0]}.output").open("wb") as output:
        process = subprocess.Popen([path, *command[1:]], stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_idle(variables: dict[str, str]) -> bool:
    environment = {**os.environ, **variables}
    command = [str(_path("sinfo")), "--noheader", "--format=%t"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=False)
    return done.stdout.strip() == "idle"


def _wait(folder: pathlib.Path, is_ready: object, what: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if callable(is_ready) and is_ready():
            return
        time.sleep(0.1)
    logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.output")))
    pytest.fail(f"{what} of Slurm was not ready within {READY_TIMEOUT_S} s\n{logs}")
