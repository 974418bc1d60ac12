"""The mistakes that newcomers make: how each is made, what ronde answers, and what to do.

The table is the source of a section of docs/TROUBLESHOOTING.md. `test_mistakes.py` makes each mistake with real
processes, and compares the section with the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# A job whose ranks train until something happens.
TRAIN = """
import time, numpy, ronde
with ronde.connect() as client:
    for step in range(2000):
        client.allreduce(numpy.ones(4), name="gradient")
        if step == 3:
            print("training", flush=True)
        time.sleep(0.05)
"""
# All ranks take one step.
STEP = """
import numpy, ronde
with ronde.connect() as client:
    client.allreduce(numpy.ones(4), name="gradient")
"""
RUN = ("ronde", "run", "-np", "2")
PROGRAM = ("python", "train.py")
# Within how many seconds the command and all that it started have ended. These are upper limits: tests run beside
# others on two busy cores, where one process may take ten seconds to start. A command that is refused starts nothing.
REFUSED_S = 25
# Agents and sidecars start, and then Python, which imports its packages.
STARTED_S = 120
# After a kill or Ctrl-C: the launcher gives workers 5 s and sidecars 10 s to end, and some seconds for messages.
LOST_S = 45
# A stall ends the job soon, which it does only if asked. LATER leaves a slow rank the time to reach the call that the
# report names.
SOON = ("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "2")
LATER = ("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "10")


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    name    -- for the test
    title   -- in a few words
    command -- what is typed; `ronde` and `python` are those under test
    shows   -- pieces of the answer, in this order
    status  -- of the launcher, as Python returns it: minus the signal that ended it; the document has the exit code
    cause   -- what it means and what to do
    program -- the file train.py; none if there is none
    files   -- further files
    variables -- of the environment
    within_s -- the time to fail: until the command and all that it started have ended
    after   -- what happens when a rank prints "training": "kill sidecar", "kill launcher" or "interrupt twice". The
               time to fail begins after it
    records -- whether sidecars write flight records: "always" or "never"; "maybe" if that depends on which process ends
               first
    never   -- pieces that must not be in the answer
    """

    name: str
    title: str
    command: Sequence[str]
    shows: Sequence[str]
    status: int
    cause: str
    program: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    within_s: float = field(kw_only=True)
    after: str = ""
    records: str = "never"
    never: Sequence[str] = ("panicked", "h2 protocol", "transport error")


MISTAKES = (
    Mistake(
        "script_missing",
        "the script is not there",
        [*RUN, "python", "trian.py"],
        ["can't open file", "exited with code 2 [RONDE-E301]"],
        2,
        "Python's own words are among the last lines of the rank. The launcher starts workers in its own directory: "
        "check the name, and that the directory is the same on all hosts.",
        within_s=STARTED_S,
    ),
    Mistake(
        "command_misspelled",
        "the command is misspelled",
        [*RUN, "pyhton", "train.py"],
        ['cannot run "pyhton"', "(command not found: pyhton) [RONDE-E302]"],
        127,
        "The program is not in PATH of the host. Give its path, or activate the environment that has it.",
        STEP,
        within_s=STARTED_S,
    ),
    Mistake(
        "bare_script",
        "the script is given without `python`",
        [*RUN, "train.py"],
        ["python train.py"],
        64,
        "`ronde run` starts a command, which is `python train.py`. Nothing was started.",
        STEP,
        within_s=REFUSED_S,
    ),
    Mistake(
        "options_behind",
        "options of ronde come after the program",
        ["ronde", "run", "python", "train.py", "-np", "2"],
        ["-np", "[RONDE-E101]"],
        64,
        "Everything after the first word of the command belongs to the command. Put `-np` before it.",
        STEP,
        within_s=REFUSED_S,
    ),
    Mistake(
        "dtype",
        "ranks have different types",
        [*RUN, *PROGRAM],
        ["Mismatched data types", "exited with code 1 [RONDE-E306]", "1 other rank failed, too"],
        1,
        "The operation fails on all ranks, with the type of each. Often one rank has loaded a checkpoint of another "
        "precision.",
        """
import numpy, ronde
with ronde.connect() as client:
    client.allreduce(numpy.ones(4, "float32" if client.rank else "float64"), name="gradient")
""",
        within_s=STARTED_S,
        records="maybe",
    ),
    Mistake(
        "shape",
        "ranks have different shapes",
        [*RUN, *PROGRAM],
        ["Mismatched ALLREDUCE tensor shapes", "exited with code 1 [RONDE-E306]", "1 other rank failed, too"],
        1,
        "The operation fails on all ranks, with the shape of each. For results whose lengths differ use `allgather`, "
        "which accepts different first dimensions.",
        """
import numpy, ronde
with ronde.connect() as client:
    client.allreduce(numpy.ones(4 + client.rank), name="gradient")
""",
        within_s=STARTED_S,
        records="maybe",
    ),
    Mistake(
        "order",
        "ranks call operations in different orders",
        [*RUN, *LATER, *PROGRAM],
        ["Missing ranks:", "its call allreduce", "exited with code 1 [RONDE-E305]"],
        1,
        "Each rank waits in a call that the other has not reached. The report names the call of each, with its line. "
        "Use the same order on all ranks, or the `_async` calls. Without `--stall-check-shutdown-time-seconds` the "
        "report comes once and the job waits.",
        """
import numpy, ronde
with ronde.connect() as client:
    for name in ("a", "b") if client.rank else ("b", "a"):
        client.allreduce(numpy.ones(4), name=name)
""",
        within_s=STARTED_S,
        records="always",
    ),
    Mistake(
        "skipped",
        "a rank skips an operation",
        [*RUN, *SOON, *PROGRAM],
        ["Missing ranks:", "exited with code 1 [RONDE-E305]"],
        1,
        "One rank calls an operation inside `if rank == 0:`, and the others do not. Call it on all ranks, or use a "
        "process set.",
        """
import numpy, ronde
with ronde.connect() as client:
    if client.rank == 0:
        client.allreduce(numpy.ones(4), name="of rank 0 alone")
    client.barrier()
""",
        within_s=STARTED_S,
        records="always",
    ),
    Mistake(
        "early_exit",
        "a rank has fewer batches",
        ["ronde", "run", "-np", "3", *PROGRAM],
        [
            "rank 1 on host localhost left the job after 3 operations",
            "[RONDE-E305]",
            "join()",
            "operations: 3 by rank 1, 4 by ranks 0 and 2",
        ],
        1,
        "The rank that takes fewer steps ends without an error, and the others wait for nobody: they fail. The block "
        "names that rank and the number of operations of each. Give all ranks the same number of batches, or call "
        "`join()` after the loop.",
        """
import numpy, pathlib, ronde, time
with ronde.connect() as client:
    for step in range(3 if client.rank == 1 else 6):
        handle = client.allreduce_async(numpy.ones(4), name=f"gradient.{step}")
        pathlib.Path(f"{step}.{client.rank}").touch()
        handle.wait()
    # Later than the next calls of the others, which are counted; the sidecar may be slow to read them.
    while client.rank == 1 and not all(pathlib.Path(f"3.{rank}").exists() for rank in (0, 2)):
        time.sleep(0.05)
    if client.rank == 1:
        time.sleep(5)
""",
        within_s=STARTED_S,
        records="always",
    ),
    Mistake(
        "worker_killed",
        "a worker is killed",
        ["ronde", "run", "-np", "3", *PROGRAM],
        [
            "rank 1 on host localhost was killed by signal 9 (SIGKILL)",
            "[RONDE-E301]",
            "2 other ranks ended because of that",
        ],
        137,
        "If nobody sent the signal, the host ran out of memory: `dmesg -T` there shows which process was killed.",
        """
import os, numpy, ronde
with ronde.connect() as client:
    client.allreduce(numpy.ones(4), name="first")
    if client.rank == 1:
        os.kill(os.getpid(), 9)
    client.allreduce(numpy.ones(4), name="second")
""",
        within_s=STARTED_S,
        records="always",
    ),
    Mistake(
        "sidecar_killed",
        "a sidecar is killed",
        [*RUN, "--sidecars", "2", *PROGRAM],
        ["sidecar 1 on host localhost, which serves rank 1, was killed by signal 9 (SIGKILL)", "[RONDE-E401]"],
        137,
        "The sidecar is a process on each host. Usually the out-of-memory killer ended it: see `dmesg`, and lower "
        "`--arena-mb`.",
        TRAIN,
        after="kill sidecar",
        within_s=LOST_S,
        records="always",
    ),
    Mistake(
        "launcher_killed",
        "the launcher is killed",
        [*RUN, "--sidecars", "2", *PROGRAM],
        ["training"],
        -9,
        "Nobody is left to say anything. The agents end workers and sidecars on all hosts, so nothing stays behind.",
        TRAIN,
        after="kill launcher",
        within_s=LOST_S,
        records="maybe",
    ),
    Mistake(
        "interrupted_twice",
        "Ctrl-C, twice",
        [*RUN, *PROGRAM],
        ["SIGINT: ending the 2 ranks that still run; once more kills them at once", "ended by SIGINT [RONDE-E210]"],
        130,
        "The first one ends ranks cleanly, within 5 seconds; the second one kills them.",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRAIN,
        after="interrupt twice",
        within_s=LOST_S,
        records="maybe",
    ),
    Mistake(
        "unknown_host",
        "a host does not exist",
        ["ronde", "run", "-np", "2", "-H", "localhost:1,no-such-host.invalid:1", *PROGRAM],
        ["cannot start ronde on host no-such-host.invalid (rank 1)", "[RONDE-E217]"],
        69,
        "The words of ssh are below the message. Correct the name, or give the address.",
        STEP,
        # Where no server of names answers, the search for one takes long.
        within_s=STARTED_S + 60,
    ),
    Mistake(
        "hostfile_typo",
        "a typo in the host file",
        ["ronde", "run", "--hostfile", "hosts", *PROGRAM],
        ["in hosts: ", "line 2 of the host file", "[RONDE-E102]"],
        64,
        "The message has the line. Each line is `HOST slots=N`.",
        STEP,
        {"hosts": "alpha slots=2\nbeta slot=2\n"},
        within_s=REFUSED_S,
    ),
    Mistake(
        "bad_toml",
        "the configuration file cannot be parsed",
        ["ronde", "run", "--config", "job.toml", *PROGRAM],
        ["[RONDE-E104]", "job.toml:2: extra `=`"],
        64,
        "The message has the line and what stands there. docs/CONFIG.md has an example.",
        STEP,
        {"job.toml": "[run]\nnum-proc = = 2\n"},
        within_s=REFUSED_S,
    ),
    Mistake(
        "ports_taken",
        "the ports are taken",
        [*RUN, "--sidecars", "2", "--ports", "{taken}", *PROGRAM],
        ["only 0 of the", "[RONDE-E404]"],
        69,
        "`ss -tulnp` names the owner. Leave `--ports` out, so that ronde takes free ones, or give a longer range.",
        STEP,
        within_s=STARTED_S,
    ),
    Mistake(
        "no_torch",
        "PyTorch is not installed",
        [*RUN, *PROGRAM],
        ['pip install "torch>=2.1"', "exited with code 1 [RONDE-E301]"],
        1,
        'Install it into the environment whose `python` starts: `pip install "torch>=2.1"`. The message for another '
        "framework has its command.",
        """
import sys
sys.modules["torch"] = None  # as if it were not installed
import ronde.torch
""",
        within_s=STARTED_S,
    ),
    Mistake(
        "no_launcher",
        "processes of another launcher, without sidecars",
        ["python", "train.py"],
        ["[RONDE-E310]", "has started this process", "ronde run -np N COMMAND"],
        1,
        "Start the program with `ronde run`. ronde refuses, because each process would train alone.",
        STEP,
        variables={"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
        within_s=STARTED_S,
    ),
    Mistake(
        "starter_without_ronde",
        "`ronde worker` without `ronde run --starter`",
        ["ronde", "worker", "python", "train.py"],
        ["ronde run --starter", "[RONDE-E303]"],
        64,
        "`ronde worker` is what the command of `ronde run --starter` starts, such as Open MPI's mpirun. Start that.",
        STEP,
        within_s=REFUSED_S,
    ),
    Mistake(
        "arena_too_small",
        "the shared memory of a worker is too small",
        [*RUN, "--arena-mb", "1", *PROGRAM],
        ["--arena-mb", "exited with code 1 [RONDE-E308]"],
        1,
        "The message has the limit and what exceeds it. Raise `--arena-mb`, or keep fewer tensors in flight.",
        """
import numpy, ronde
with ronde.connect() as client:
    client.allreduce(numpy.ones(4 << 20, "float32"), name="gradient")
""",
        within_s=STARTED_S,
        records="maybe",
    ),
    Mistake(
        "negative",
        "a negative number",
        ["ronde", "run", "-np", "-2", *PROGRAM],
        ["invalid value '-2' for '--num-proc <N>': it must be a whole number from 1 to", "[RONDE-E101]"],
        64,
        "The message has the option and the range of its values.",
        STEP,
        within_s=REFUSED_S,
    ),
    Mistake(
        "plugin_missing",
        "a plugin is not there",
        [*RUN, "--sidecars", "2", "--plugin", "missing.wasm", *PROGRAM],
        ["missing.wasm cannot be read", "[RONDE-E801]"],
        64,
        "Check the path, which is that on each host with a sidecar. `ronde plugin inspect FILE` shows what a file is.",
        STEP,
        within_s=STARTED_S,
    ),
    Mistake(
        "unknown_variable",
        "a variable has a typo",
        [*RUN, *PROGRAM],
        ["[RONDE-E104]", "RONDE_RUN_VERBOS: no option", "is RONDE_RUN_VERBOSE meant?"],
        64,
        "A variable that begins with `RONDE_RUN_` must be an option of `ronde run`. The message has the nearest one.",
        STEP,
        variables={"RONDE_RUN_VERBOS": "true"},
        within_s=REFUSED_S,
    ),
)
