"""The flags of `horovodrun`. Parsed arguments have Horovod's names."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from horovod.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]


def parser() -> argparse.ArgumentParser:
    """Returns a parser of Horovod's command line. Flags that are not given are absent from the parsed arguments."""
    found = argparse.ArgumentParser(
        prog="horovodrun",
        description="Starts a Horovod job on ronde: runs the equivalent `ronde run`.",
        argument_default=argparse.SUPPRESS,
        epilog="docs/MIGRATING.md of ronde lists which flags take effect and which are accepted and ignored.",
    )
    found.add_argument("-v", "--version", action="version", version=__version__, help="print the version and exit")
    found.add_argument("-np", "--num-proc", type=count, metavar="N", help="how many processes to start")
    found.add_argument("-cb", "--check-build", action="store_true", help="show what this installation supports")
    found.add_argument("--config-file", metavar="FILE", help="a YAML file; flags of the command line override it")
    found.add_argument("--verbose", action="store_true", help="print more messages")
    found.add_argument("command", nargs=argparse.REMAINDER, help="the command of each process")
    _job(found.add_argument_group("the job"))
    _hosts(found.add_argument_group("hosts"))
    _tuning(found.add_argument_group("tuning"))
    _autotune(found.add_argument_group("autotune"))
    _elastic(found.add_argument_group("elastic jobs"))
    _observing(found.add_argument_group("timeline, stalls, logs"), found)
    _libraries(found.add_argument_group("who starts processes, and libraries"), found)
    return found


@dataclass(frozen=True)
class Number:
    """An argparse type for numbers. `check_ranges` checks the range after parsing.

    kind     -- converts text to a number
    what     -- a description of valid numbers
    is_right -- whether a number is in its range
    """

    kind: Callable[[str], float]
    what: str
    is_right: Callable[[float], bool]

    def __call__(self, text: str) -> float:
        """Converts text to the number. Raises argparse's error for other text."""
        try:
            return self.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.what}") from None


def check_ranges(parser: argparse.ArgumentParser, given: Mapping[str, Any]) -> None:
    """Raises ValueError, as Horovod does, for a number out of its range."""
    for action in parser._actions:
        if not isinstance(action.type, Number) or action.dest not in given:
            continue
        value = given[action.dest]
        for each in value if isinstance(value, list) else [value]:
            if not action.type.is_right(each):
                flag = "/".join(action.option_strings)
                raise ValueError(f"argument {flag}: '{each:g}' is not {action.type.what}")


count = Number(int, "a whole number of at least 0", lambda value: value >= 0)
amount = Number(float, "a number of at least 0", lambda value: value >= 0)
fraction = Number(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _switch(group: Any, name: str, what: str) -> None:
    """Adds `--name` and `--no-name`. The last one takes effect."""
    dest = name.replace("-", "_")
    pair = group.add_mutually_exclusive_group()
    pair.add_argument(f"--{name}", dest=dest, action="store_true", help=what)
    pair.add_argument(f"--no-{name}", dest=dest, action="store_false", help="the opposite")


def _job(group: Any) -> None:
    group.add_argument("--start-timeout", type=count, metavar="SECONDS", help="how long the job may take to start")
    group.add_argument("--output-filename", metavar="DIR", help="also write output to DIR/rank.N/stdout and stderr")
    group.add_argument("--disable-cache", action="store_true", help="no effect here: no checks are cached")


def _hosts(group: Any) -> None:
    choice = group.add_mutually_exclusive_group()
    choice.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and how many processes each takes")
    choice.add_argument("-hostfile", "--hostfile", metavar="FILE", help="a file with a line `host slots=n` for each")
    choice.add_argument("--host-discovery-script", metavar="FILE", help="prints the hosts of an elastic job")
    group.add_argument("--network-interfaces", metavar="NAME,...", help="the interfaces or networks to be used")
    group.add_argument(
        "--network-interface", action="append", metavar="NAME", help="one interface; may be given several times"
    )
    group.add_argument("-p", "--ssh-port", type=count, metavar="PORT", help="the port of ssh on other hosts")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh")


def _tuning(group: Any) -> None:
    group.add_argument("--fusion-threshold-mb", type=count, metavar="MB", help="the most that is fused; 0 for none")
    group.add_argument("--cycle-time-ms", type=amount, metavar="MS", help="no effect here: there are no cycles")
    group.add_argument("--cache-capacity", type=count, metavar="N", help="capacity of the request cache")
    _switch(group, "hierarchical-allreduce", "reduce on each host first")
    _switch(group, "hierarchical-allgather", "no effect here")
    _switch(group, "torus-allreduce", "no effect here")
    group.add_argument("--thread-affinity", type=count, metavar="CORE", help="the core of the sidecars' threads")


def _autotune(group: Any) -> None:
    _switch(group, "autotune", "search for the best settings")
    group.add_argument("--autotune-log-file", metavar="FILE", help="the log file of the search")
    for name in ("warmup-samples", "steps-per-sample", "bayes-opt-max-samples"):
        group.add_argument(f"--autotune-{name}", type=count, metavar="N", help="a bound of the search")
    group.add_argument("--autotune-gaussian-process-noise", type=fraction, metavar="X", help="from 0 to 1")


def _elastic(group: Any) -> None:
    group.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=count, metavar="N", help="fewest ranks")
    group.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=count, metavar="N", help="most ranks")
    group.add_argument("--slots-per-host", dest="slots", type=count, metavar="N", help="slots of hosts printed without")
    group.add_argument("--elastic-timeout", type=count, metavar="SECONDS", help="how long to wait for the fewest ranks")
    group.add_argument("--reset-limit", type=count, metavar="N", help="how often the job may restart")
    group.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=count,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="how long failed hosts are excluded",
    )


def _observing(group: Any, whole: Any) -> None:
    group.add_argument("--timeline-filename", metavar="FILE", help="where the timeline is written, or DYNAMIC")
    _switch(group, "timeline-mark-cycles", "mark the coordinator's orders in the timeline")
    stalls = group.add_mutually_exclusive_group()
    stalls.add_argument("--no-stall-check", action="store_true", help="never report tensors that wait for some ranks")
    stalls.add_argument("--stall-check", dest="no_stall_check", action="store_false", help="the opposite")
    for name, what in (("warning", "is reported"), ("shutdown", "ends the job; 0 for never")):
        group.add_argument(
            f"--stall-check-{name}-time-seconds", type=count, metavar="SECONDS", help=f"age at which one {what}"
        )
    group.add_argument("--log-level", choices=LEVELS, type=str.upper, help="the least serious lines that are logged")
    times = whole.add_mutually_exclusive_group()
    times.add_argument(
        "--log-with-timestamp", dest="log_with_timestamp", action="store_true", help="log lines have times"
    )
    times.add_argument(
        "--log-without-timestamp", dest="log_with_timestamp", action="store_false", help="they have none"
    )
    times.add_argument("--log-hide-timestamp", dest="log_hide_timestamp", action="store_true", help="deprecated")
    times.add_argument("--no-log-hide-timestamp", dest="log_hide_timestamp", action="store_false", help="deprecated")
    times.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="prefix_output_with_timestamp",
        action="store_true",
        help="begin each line of output with the time",
    )


def _libraries(group: Any, whole: Any) -> None:
    _switch(group, "mpi-threads-disable", "with --mpi: mpi_threads_supported() is False")
    group.add_argument("--mpi-args", metavar="TEXT", help="more options of mpirun; with jsrun its --smpiargs")
    group.add_argument("--tcp", dest="tcp_flag", action="store_true", help="sets NCCL_IB_DISABLE=1")
    group.add_argument("--binding-args", metavar="TEXT", help="in place of mpirun's or jsrun's options about cores")
    group.add_argument("--num-nccl-streams", type=count, metavar="N", help="about NCCL")
    group.add_argument("--gloo-timeout-seconds", type=count, metavar="SECONDS", help="about Gloo")
    starters = whole.add_mutually_exclusive_group()
    starters.add_argument("--gloo", dest="use_gloo", action="store_true", help="start by `ronde run`, as without it")
    starters.add_argument("--mpi", dest="use_mpi", action="store_true", help="start by Open MPI's mpirun")
    starters.add_argument(
        "--jsrun", dest="use_jsrun", action="store_true", help="start by jsrun, within LSF the default"
    )
