"""Trains with a real Slurm: a controller and two slurmd on this machine, each with an address of its own, in namespaces
that end with the test. Needs root, and Debian's slurm-wlm and munge."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, WORKER, leave_out, results
from hosts import Hosts

SLURM = ROOT / "compose" / "slurm"
# Slurm itself takes most of it.
TIMEOUT_S = 150
# As a site that kills steps when a task fails, which the script's option overrides.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=controller(10.9.0.10)
SlurmctldPort=27817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
KillOnBadExit=1
TaskProlog={folder}/prolog
NodeName=n1 NodeHostname=controller NodeAddr=10.9.0.11 Port=27818 CPUs=2 RealMemory=500
NodeName=n2 NodeHostname=controller NodeAddr=10.9.0.12 Port=27819 CPUs=2 RealMemory=500
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
# Two nodes of one machine share its /tmp.
PROLOG = '#!/bin/sh\necho "export TMPDIR={folder}/tmp-$SLURMD_NODENAME"\n'
NAMES = "127.0.0.1 localhost\n10.9.0.10 controller\n10.9.0.11 n1\n10.9.0.12 n2\n"
# The first process of its process namespace: all others end with it.
CLUSTER = """set -eu
mount --bind {folder}/hosts /etc/hosts
hostname controller
ip link set lo up
ip link add v0 type veth peer name v1
for number in 10 11 12; do ip addr add 10.9.0.$number/24 dev v0; done
ip link set v0 up
ip link set v1 up
cd {folder}
munged --force --foreground --key-file=munge.key --socket=$PWD/munge.sock --pid-file=$PWD/munge.pid \\
    --log-file=$PWD/munge.log --seed-file=$PWD/munge.seed 2>/dev/null &
wait_for() {{
    for _ in $(seq 200); do
        if "$@"; then return; fi
        sleep 0.1
    done
    echo "never: $*" >&2
    exit 1
}}
wait_for test -S munge.sock
slurmctld -D 2>/dev/null &
slurmd -D -N n1 2>/dev/null &
slurmd -D -N n2 2>/dev/null &
are_idle() {{ [ "$(sinfo -h -N -o %T 2>/dev/null | sort -u)" = idle ]; }}
wait_for are_idle
{jobs}
"""
JOBS = """
submit() {{
    name=$1
    shift
    status=0
    timeout 60 sbatch --quiet --wait --output="$PWD/$name.out" "$@" || status=$?
    echo "$status" >"$name.status"
}}
submit trained {script} {train}
submit lost {script} {train} --fail-rank 2
submit launcher --nodes=2 --ntasks-per-node=2 launcher.sbatch
job=$(sbatch --parsable --output="$PWD/cancelled.out" {script} sleep 60)
both_serve() {{ [ "$(ls tmp-n1/*/rpc.sock tmp-n2/*/rpc.sock 2>/dev/null | wc -l)" = 2 ]; }}
wait_for both_serve
scancel "$job"
is_over() {{ [ -z "$(squeue -h)" ]; }}
wait_for is_over
"""
LAUNCHER = """#!/bin/bash
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/$/:2/' | paste -sd,)
exec {ronde} run -np 4 -H "$hosts" --remote-shell {shell} {train}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, ronde: str) -> pathlib.Path:
    """The folder of a cluster that has run all jobs."""
    if why_not := Hosts.why_not():
        leave_out("netns", why_not)
    for program in ["slurmctld", "slurmd", "sbatch", "munged"]:
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            leave_out("slurm", f"{program} is not installed; `make deploy-test` installs it on Debian")
    folder = tmp_path_factory.mktemp("s")
    for name in ["state", "spool-n1", "spool-n2", "tmp-n1", "tmp-n2"]:
        (folder / name).mkdir()
    train = f"{sys.executable} {WORKER}"
    write(folder / "munge.key", os.urandom(64).hex(), 0o600)
    write(folder / "slurm.conf", CONFIGURATION.format(folder=folder))
    write(folder / "prolog", PROLOG.format(folder=folder), 0o755)
    write(folder / "hosts", NAMES)
    write(folder / "launcher.sbatch", LAUNCHER.format(ronde=ronde, shell=SLURM / "remote-shell", train=train))
    jobs = JOBS.format(script=SLURM / "train.sbatch", train=train)
    write(folder / "cluster", CLUSTER.format(folder=folder, jobs=jobs))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    changed = {"PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(folder / "slurm.conf")}
    environment = {**kept, **changed, "HOME": str(folder), "RONDE": ronde}
    namespaces = ["--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = ["unshare", *namespaces, "bash", str(folder / "cluster")]
    log = (folder / "log").open("w")
    status = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=TIMEOUT_S, check=False).returncode
    assert status == 0, (folder / "log").read_text()
    return folder


def write(path: pathlib.Path, text: str, mode: int = 0o644) -> None:
    path.write_text(text)
    path.chmod(mode)


def outcome(folder: pathlib.Path, name: str) -> tuple[int, str]:
    return int((folder / f"{name}.status").read_text()), (folder / f"{name}.out").read_text()


RANKS = [(0, 0), (1, 1), (2, 0), (3, 1)]


@pytest.mark.heavy
def test_two_nodes_of_slurm(finished: pathlib.Path) -> None:
    """One test, because processes of pytest would start a cluster each."""
    status, text = outcome(finished, "trained")
    assert status == 0, text
    assert [(result["rank"], result["local_rank"]) for result in results(text)] == RANKS
    # Its errors name a lost rank, although Slurm is configured to kill the other tasks.
    status, text = outcome(finished, "lost")
    assert status == 7, text
    assert text.count("PeerLostError: rank 2 on sidecar 1 is gone") == 3, text
    status, text = outcome(finished, "launcher")
    assert status == 0, text
    lines = "\n".join(line.split("<stdout>:", 1)[-1] for line in text.splitlines())
    assert [(result["rank"], result["local_rank"]) for result in results(lines)] == RANKS
    # Nothing but flight records remains, also of the job that was cancelled.
    assert "CANCELLED" in (finished / "cancelled.out").read_text()
    places = [finished / ".ronde", finished / "tmp-n1", finished / "tmp-n2"]
    left = [str(path) for place in places for path in place.iterdir()]
    assert [path for path in left if "/ronde.flight-" not in path] == []
