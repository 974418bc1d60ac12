"""A sidecar may open as many files as its hard limit allows, whatever the soft limit of the shell is."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys

from conftest import PACKAGE, WORKERS, ronde_binary

LOW = 256

PROGRAM = """
import pathlib, resource
import own_sidecar
limits = pathlib.Path(f"/proc/{own_sidecar.process()}/limits").read_text().splitlines()
(line,) = [line for line in limits if line.startswith("Max open files")]
print("sidecar", *line.split()[3:5])
print("worker", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
import ronde
ronde.connect().close()
"""


def test_the_soft_limit_of_open_files_is_raised_in_sidecars_only() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard == resource.RLIM_INFINITY or hard > LOW
    job = [ronde_binary(), "run", "-np", "1", sys.executable, "-c", PROGRAM]
    command = f"ulimit -Sn {LOW}; exec {shlex.join(job)}"
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGE}:{WORKERS}"}
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ((soft, hard_of_sidecar),) = re.findall(r"sidecar (\S+) (\S+)", done.stdout)
    assert soft == hard_of_sidecar, "the soft limit is the hard one"
    assert f"worker {LOW}" in done.stdout, "programs that call select() count on it"
