"""Tests ronde on a GPU of this machine, and measures it. Prints a table. At most eight minutes.

    cd tests && python -m gpu

Two ranks share the GPUs, so one is enough; with several, two levels (NCCL within the host) are run, too, by the workers
and by the sidecars. For root, two sidecars that are compared with others are in network namespaces of their own. Each
step runs real workers and sidecars; a step that fails is a row of the table, and ends the command with status 1.
Without a GPU, its driver or a PyTorch for CUDA, the command prints why nothing was run, and ends with status 3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from ronde.bench.network import Network

TESTS = pathlib.Path(__file__).resolve().parent.parent
WORKERS = TESTS.parent / "sdk-python" / "tests" / "workers"
HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT_S = 480.0
NOT_RUN, FAILED = 3, 1
TWO_LEVELS_GPUS_MIN = 2
HOSTS = 2
LANES_CORES_MIN = 16

ASK = """
import ronde
from ronde import _ronde
try:
    found = _ronde.gpus()
except ronde.RondeError as error:
    raise SystemExit(str(error))
try:
    import torch
except ImportError as error:
    raise SystemExit(f"PyTorch is not installed: {error}")
if torch.version.cuda is None or not torch.cuda.is_available():
    raise SystemExit(f"PyTorch {torch.__version__} finds no GPU; install one for CUDA")
print("; ".join(f"{gpu['name']}, {gpu['memory_bytes'] >> 30} GiB" for gpu in found))
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs")
"""


class Step(NamedTuple):
    """A job to run.

    title   -- its row
    command -- what each rank runs
    sidecars -- how many hosts the job is as if on
    staging -- who copies, as RONDE_GPU_STAGING
    levels -- in how many levels, as RONDE_GPU_LEVELS
    ranks -- how many; with two levels each has a GPU of its own
    options -- of `ronde run`
    variables -- of the ranks
    is_apart -- whether the sidecars are in network namespaces of their own, where that is possible
    """

    title: str
    command: list[str]
    sidecars: int
    staging: str = "torch"
    levels: str = "1"
    ranks: int = 2
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    is_apart: bool = False

    def placement(self, network: Network | None) -> list[str]:
        """Returns the options of `ronde run` that place the ranks."""
        if network is None or not self.is_apart:
            return ["-np", str(self.ranks), "--sidecars", str(self.sidecars)]
        each = self.ranks // self.sidecars
        hosts = ",".join(f"{network.address(host)}:{each}" for host in range(self.sidecars))
        return ["-np", str(self.ranks), "-H", hosts, "--remote-shell", network.remote_shell]


class Row(NamedTuple):
    """A line of the table."""

    title: str
    result: str
    is_ok: bool


def main() -> int:
    """Runs all steps; returns the process's exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ronde", default=os.environ.get("RONDE_BIN", "ronde"), help="the binary")
    given = options.parse_args()
    found = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False, timeout=120)
    if found.returncode != 0:
        print(f"NOT RUN: {(found.stderr.strip() or found.stdout.strip()).splitlines()[-1]}", file=sys.stderr)
        return NOT_RUN
    print(found.stdout, end="", flush=True)
    until = time.monotonic() + TIMEOUT_S
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ronde-gpu-"))
        network, why_not = None, Network.why_not()
        if why_not is None:
            network = stack.enter_context(contextlib.closing(Network(HOSTS, pathlib.Path(folder))))
        else:
            print(f"Sidecars are on the loopback, not in network namespaces: {why_not}", flush=True)
        rows = [
            row
            for step in steps(folder, int(found.stdout.split()[-2]))
            for row in run(given.ronde, step, until, network)
        ]
        rows += lanes(given.ronde, until, network, folder)
    print(table(rows))
    return 0 if all(row.is_ok for row in rows) else FAILED


def two_levels(gpus: int) -> list[tuple[int, int]]:
    """Returns the ranks and sidecars of jobs in two levels: as one host, and where there are enough GPUs as two."""
    one, two = (gpus, 1), (gpus // 4 * 4, 2)
    return [] if gpus < TWO_LEVELS_GPUS_MIN else [one, two] if gpus >= 2 * TWO_LEVELS_GPUS_MIN else [one]


def steps(folder: str, gpus: int) -> list[Step]:
    """Returns the jobs for a machine with so many GPUs, in order."""
    collectives, training = [str(WORKERS / "torch_cuda.py")], [str(HERE / "training.py"), "cuda"]
    speed = str(HERE / "speed.py")
    made = []
    for staging in ("torch", "ronde"):
        suffix = f"RONDE_GPU_STAGING={staging}"
        made += [
            Step(f"collectives and an optimizer, one host, {suffix}", collectives, 1, staging),
            Step(f"collectives and an optimizer, two sidecars, {suffix}", collectives, 2, staging),
            Step(f"training, against one process, {suffix}", training, 2, staging),
            Step(f"speed, {suffix}", [speed, "ronde", "cuda"], 2, staging, is_apart=True),
        ]
    for ranks, sidecars in two_levels(gpus):
        suffix = f"{ranks} GPUs, {sidecars} sidecars, RONDE_GPU_LEVELS=2"
        made += [
            Step(f"collectives and an optimizer, {suffix}", collectives, sidecars, "ronde", "2", ranks),
            Step(f"speed, {suffix}", [speed, "ronde", "cuda"], sidecars, "ronde", "2", ranks),
        ]
        suffix = f"{ranks} GPUs, {sidecars} sidecars with --gpu"
        shared = ("--gpu",)
        made += [
            Step(f"collectives and an optimizer, {suffix}", collectives, sidecars, "ronde", "1", ranks, shared),
            Step(f"speed, {suffix}", [speed, "ronde", "cuda"], sidecars, "ronde", "1", ranks, shared),
        ]
    made += [
        Step("types and collectives", [str(HERE / "kinds.py"), "cuda"], 2, "ronde"),
        Step("overlap of copies with the backward pass", [str(HERE / "overlap.py"), "cuda"], 2, "ronde"),
    ]
    if gpus >= TWO_LEVELS_GPUS_MIN:
        nccl = [speed, "nccl", "cuda", f"{folder}/nccl"]
        made.append(Step(f"speed of NCCL, {gpus} GPUs", nccl, 1, ranks=gpus))
    made.append(Step("speed of Gloo", [speed, "gloo", "cuda", f"{folder}/store"], 2, is_apart=True))
    # Between ranks on one GPU, or on GPUs of one host, NCCL uses its network only if it is kept from everything else.
    apart = [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_NET_GDR_LEVEL", "LOC")]
    apart.append(("NCCL_MULTI_RANK_GPU_ENABLE", "1"))
    for title, options, own in [
        ("NCCL without the net plugin, in plaintext", (), [("NCCL_NET", "Socket")]),
        ("NCCL with the net plugin", ("--nccl-net",), []),
    ]:
        command = [speed, "nccl", "cuda", f"{folder}/store-of-nccl{len(options)}"]
        made.append(Step(title, command, HOSTS, options=options, variables=(*apart, *own), is_apart=True))
    return made


def lanes(ronde: str, until: float, network: Network | None, folder: str) -> list[Row]:
    """Measures sealed links with several lanes beside Gloo in plaintext, where there are cores for them.

    Tensors are in main memory.
    """
    cores, title = len(os.sched_getaffinity(0)), "lanes between two hosts"
    if cores < LANES_CORES_MIN:
        return [Row(title, f"not run: this machine has {cores} cores, and {LANES_CORES_MIN} are needed", True)]
    if network is None:
        return [Row(title, "not run: network namespaces are needed", True)]
    speed = str(HERE / "speed.py")
    made = [
        Step(f"{count} lanes", [speed, "ronde", "cpu"], HOSTS, options=("--lanes", str(count)), is_apart=True)
        for count in (1, 2, 4, 8)
    ]
    made.append(Step("Gloo in plaintext", [speed, "gloo", "cpu", f"{folder}/store-of-lanes"], HOSTS, is_apart=True))
    return [row for step in made for row in run(ronde, step, until, network)]


def run(ronde: str, step: Step, until: float, network: Network | None) -> list[Row]:
    """Runs a job. Returns its row, and one for each figure that it printed."""
    left = until - time.monotonic()
    if left <= 0:
        return [Row(step.title, f"not run: the {TIMEOUT_S:g} s of the command are over", False)]
    command = [ronde, "run", *step.placement(network), *step.options, sys.executable, *step.command]
    own = {"RONDE_GPU_STAGING": step.staging, "RONDE_GPU_LEVELS": step.levels, **dict(step.variables)}
    environment = {**os.environ, **own}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left, env=environment)
    except subprocess.TimeoutExpired:
        return [Row(step.title, f"not complete after {left:.0f} s", False)]
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        return [Row(step.title, f"FAILED with status {done.returncode}; its output is above", False)]
    found = [Row(f"{title}: {step.title}", text, True) for title, text in figures(done.stdout)]
    return [Row(step.title, "passed", True), *found]


def figures(output: str) -> list[tuple[str, str]]:
    """Returns the figures in a job's output: lines that end in JSON after the word FIGURE."""
    marked = [line.partition("FIGURE ")[2] for line in output.splitlines() if "FIGURE " in line]
    return [(str(title), str(text)) for title, text in map(json.loads, marked)]


def table(rows: list[Row]) -> str:
    """Returns the table, in Markdown."""
    lines = [f"| {row.title} | {row.result} |" for row in rows]
    return "\n".join(["| on a GPU | |", "|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main())
