"""Translates Horovod's flags to those of `ronde run`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod.runner.common.util.config_parser import set_env_from_args
from horovod.runner.common.util.hosts import check_slots, parse_host_file, parse_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

# Flags with a value that `ronde run` has, too.
_VALUES = {
    "num_proc": "--num-proc",
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "start_timeout": "--start-timeout",
    "output_filename": "--output-filename",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "fusion_threshold_mb": "--fusion-threshold-mb",
    "cache_capacity": "--cache-capacity",
    "thread_affinity": "--thread-affinity",
    "timeline_filename": "--timeline-filename",
    "stall_check_warning_time_seconds": "--stall-check-warning-time-seconds",
    "stall_check_shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
}
# The notes for a switch that is on, and for one that is off.
_SWITCHES = {
    "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    "timeline_mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    "no_stall_check": ("--no-stall-check", "--stall-check"),
    "log_with_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
    "prefix_output_with_timestamp": ("--prefix-output-with-timestamp", None),
    "verbose": ("--verbose", None),
}
_LEVELS = {
    "TRACE": "trace",
    "DEBUG": "debug",
    "INFO": "info",
    "WARNING": "warn",
    "ERROR": "error",
    "FATAL": "error",
}
# Flags that are accepted for compatibility and ignored, each with the reason.
IGNORED = {
    "cycle_time_ms": ("--cycle-time-ms", "nothing waits for the end of a cycle"),
    "hierarchical_allgather": (
        "--hierarchical-allgather",
        "each rank's tensor goes once to every other host in any case",
    ),
    "torus_allreduce": ("--torus-allreduce", "there is no such algorithm"),
    "disable_cache": ("--disable-cache", "no checks are kept from one job to the next"),
    "mpi_threads_disable": (
        "--mpi-threads-disable",
        "there is no MPI; with --mpi, mpi_threads_supported() returns False",
    ),
    "mpi_args": ("--mpi-args", "without --mpi there is no mpirun"),
    "binding_args": ("--binding-args", "without --mpi there is no mpirun"),
    "num_nccl_streams": ("--num-nccl-streams", "each set of ranks has one NCCL communicator"),
    "gloo_timeout_seconds": ("--gloo-timeout-seconds", "there is no Gloo; see --start-timeout"),
}
# Its variable changes what `mpi_threads_supported` returns, so that workers have it.
_WITH_VARIABLE = {"mpi_threads_disable"}
# Switches without an opposite: off, they have no effect.
_ONLY_ON = {"disable_cache"}
# Flags of elastic jobs. One of the first two makes a job elastic.
ELASTIC_BY = ("min_num_proc", "host_discovery_script")
_ELASTIC = {
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
    "host_discovery_script": "--host-discovery-script",
}
_COOLDOWN = "cooldown_range"
# These flags take effect only with --autotune.
_SEARCH = {
    "autotune_log_file": "--autotune-log-file",
    "autotune_warmup_samples": "--autotune-warmup-samples",
    "autotune_steps_per_sample": "--autotune-steps-per-sample",
    "autotune_bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
    "autotune_gaussian_process_noise": "--autotune-gaussian-process-noise",
}


@dataclass
class Translation:
    """The arguments that start a job.

    options -- options of the launcher
    exports -- variables of the workers
    notes   -- messages to the user about flags that act differently here, or have no effect
    """

    options: list[str] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """Returns the options of `ronde run`, including the variables."""
        return [*self.options, *(f"--export={name}={value}" for name, value in self.exports.items())]


class Launcher(NamedTuple):
    """The command that starts a job, without the worker's command, and messages to the user about it."""

    words: list[str]
    notes: list[str]


def translate(given: Mapping[str, Any]) -> Translation:
    """Translates the given flags, by name, to `ronde run`.

    Raises ValueError for invalid flags.
    """
    check(given)
    found = Translation(exports={"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", **exports_of(given)})
    found.options += _elastic_options(given)
    found.options += _autotune_options(given)
    for name, flag in _VALUES.items():
        if name in given:
            found.options.append(f"{flag}={given[name]}")
    for name, (on, off) in _SWITCHES.items():
        chosen = (on if given[name] else off) if name in given else None
        found.options += [chosen] if chosen else []
    if "log_level" in given:
        found.options.append(f"--log-level={_LEVELS[given['log_level']]}")
    names, notes = interfaces(given)
    found.options += [f"--network-interfaces={','.join(names)}"] if names else []
    found.notes += notes
    if "log_hide_timestamp" in given:
        found.options.append(_timestamps(given))
    found.notes += notes_of(given, IGNORED)
    return found


def check(given: Mapping[str, Any]) -> None:
    """Raises ValueError for invalid flags."""
    _check_elastic(given)
    _check_hosts(given)


def exports_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables in which Horovod passes flags to workers.

    Those of flags without effect are left out: a note reports the flag, and `init` would report the variable again.
    """
    exports: dict[str, str] = {"HOROVOD_ELASTIC": "1"} if is_elastic(given) else {}
    kept = {name: value for name, value in given.items() if name not in IGNORED or name in _WITH_VARIABLE}
    set_env_from_args(exports, argparse.Namespace(**{**kept, "nics": interfaces(given)[0]}))
    return exports


def is_elastic(given: Mapping[str, Any]) -> bool:
    """Returns whether the flags describe a job whose workers come and go."""
    return any(given.get(name) is not None for name in ELASTIC_BY)


def _elastic_options(given: Mapping[str, Any]) -> list[str]:
    options = [f"{flag}={given[name]}" for name, flag in _ELASTIC.items() if name in given and name != _COOLDOWN]
    if _COOLDOWN in given:
        options += [_ELASTIC[_COOLDOWN], *(str(each) for each in given[_COOLDOWN])]
    return options


def _autotune_options(given: Mapping[str, Any]) -> list[str]:
    if "autotune" not in given:
        return []
    if not given["autotune"]:
        return ["--no-autotune"]
    options = ["--autotune", *(f"{flag}={given[name]}" for name, flag in _SEARCH.items() if name in given)]
    # As in Horovod, a value that is given stays as it is.
    fixed = "fusion_threshold_mb" in given
    return [*options, "--autotune-parameters=chunk-bytes,lanes"] if fixed else options


def interfaces(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the given network interfaces, and messages to the user about deprecated forms."""
    single = given.get("network_interface", [])
    names = [name for text in [given.get("network_interfaces", ""), *single] for name in text.split(",") if name]
    note = "several names in --network-interface are deprecated; use --network-interfaces"
    return names, [note] if any("," in text for text in single) else []


def notes_of(given: Mapping[str, Any], ignored: Mapping[str, tuple[str, str]]) -> list[str]:
    """Returns a message to the user for each given flag without effect, with the reason, and for a deprecated one."""
    notes = [
        f"{flag} has no effect here: {reason}"
        for name, (flag, reason) in ignored.items()
        if name in given and (given[name] or name not in _ONLY_ON)
    ]
    if any(name in given for name in _SEARCH) and not given.get("autotune"):
        notes.append("--autotune-... has no effect without --autotune")
    if "log_hide_timestamp" in given:
        notes.append(f"--log-hide-timestamp is deprecated; use {_timestamps(given)}")
    return notes


def _timestamps(given: Mapping[str, Any]) -> str:
    """Returns the flag that has replaced --log-hide-timestamp or its opposite, of which one is given."""
    return "--log-without-timestamp" if given["log_hide_timestamp"] else "--log-with-timestamp"


def _check_elastic(given: Mapping[str, Any]) -> None:
    flags = ", ".join(flag for name, flag in _ELASTIC.items() if name in given)
    if flags and not is_elastic(given):
        raise ValueError(f"{flags}: for elastic jobs only; give --min-np or --host-discovery-script, too")
    if flags and (given.get("use_mpi") or given.get("use_jsrun")):
        raise ValueError(
            f"{flags}: the processes of elastic jobs are started by `ronde run`; leave out --mpi and --jsrun"
        )
    numbers = [(name, given[name]) for name in ("min_num_proc", "num_proc", "max_num_proc") if name in given]
    for (low, few), (high, many) in zip(numbers, numbers[1:]):
        if few > many:
            raise ValueError(f"{low} is {few}, and {high} is {many}: it is at least {few}")


def _check_hosts(given: Mapping[str, Any]) -> None:
    if given.get("num_proc") == 0:
        raise ValueError("the number of processes (-np) is 0; it is at least 1")
    if "hosts" in given and "hostfile" in given:
        raise ValueError("hosts and hostfile are both given; give one of them")
    if "hosts" in given:
        check_slots(parse_hosts(given["hosts"]), given.get("num_proc", 0))
    elif "hostfile" in given:
        check_slots(parse_host_file(given["hostfile"]), given.get("num_proc", 0))
