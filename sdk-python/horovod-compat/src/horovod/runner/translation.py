"""From Horovod's flags to those of `ronde run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from horovod.runner.hosts import check_slots, parse_host_file, parse_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

# Flags with a value, that `ronde run` has too.
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
# What is said when a switch is on, and when it is off.
_SWITCHES = {
    "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    "timeline_mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    "stall_check": ("--stall-check", "--no-stall-check"),
    "log_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
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
# Taken for the sake of old scripts; each with the reason why it does nothing.
WITHOUT_MEANING = {
    "cycle_time_ms": ("--cycle-time-ms", "nothing waits for the end of a cycle"),
    "hierarchical_allgather": (
        "--hierarchical-allgather",
        "each rank's tensor goes once to every other host in any case",
    ),
    "torus_allreduce": ("--torus-allreduce", "there is no such algorithm"),
    "disable_cache": ("--disable-cache", "no checks are kept from one job to the next"),
    "mpi_threads_disable": ("--mpi-threads-disable", "there is no MPI"),
    "mpi_args": ("--mpi-args", "there is no MPI"),
    "tcp": ("--tcp", "there is no MPI, and no NCCL"),
    "binding_args": ("--binding-args", "there is no mpirun"),
    "num_nccl_streams": ("--num-nccl-streams", "there is no NCCL"),
    "gloo_timeout_seconds": ("--gloo-timeout-seconds", "there is no Gloo; see --start-timeout"),
    "controller": ("--gloo, --mpi, --jsrun", "there is one controller, ronde"),
}
# Switches without an opposite: off, they ask for nothing.
_ONLY_ON = {"disable_cache", "tcp"}
# Asked for, and not there: a job without them is another one than was meant.
_ELASTIC = {
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots_per_host": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "blacklist_cooldown_range": "--blacklist-cooldown-range",
    "host_discovery_script": "--host-discovery-script",
}
# They mean something only with --autotune.
_SEARCH = (
    "autotune_log_file",
    "autotune_warmup_samples",
    "autotune_steps_per_sample",
    "autotune_bayes_opt_max_samples",
    "autotune_gaussian_process_noise",
)


@dataclass
class Translation:
    """The options of `ronde run`, and what to tell the user about others."""

    options: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def translate(given: Mapping[str, Any]) -> Translation:
    """What the flags that were given, by their names, mean to `ronde run`.

    Raises ValueError for what is wrong with them, and NotImplementedError for what is not there yet.
    """
    _refuse_what_is_not_there(given)
    _check_hosts(given)
    found = Translation()
    for name, flag in _VALUES.items():
        if name in given:
            found.options.append(f"{flag}={given[name]}")
    for name, (on, off) in _SWITCHES.items():
        chosen = (on if given[name] else off) if name in given else None
        found.options += [chosen] if chosen else []
    if "log_level" in given:
        found.options.append(f"--log-level={_LEVELS[given['log_level']]}")
    _add_deprecated(given, found)
    _add_notes(given, found)
    return found


def _refuse_what_is_not_there(given: Mapping[str, Any]) -> None:
    elastic = [flag for name, flag in _ELASTIC.items() if name in given]
    if elastic:
        raise NotImplementedError(
            f"{', '.join(elastic)}: elastic jobs are not there yet; give a fixed number of processes with -np, and "
            "hosts with -H"
        )
    if given.get("autotune"):
        raise NotImplementedError(
            "--autotune: the search for the best settings is not there yet; leave it out, and set what you know, such "
            "as --fusion-threshold-mb"
        )


def _check_hosts(given: Mapping[str, Any]) -> None:
    if given.get("num_proc") == 0:
        raise ValueError("the number of processes (-np) is 0; it is at least 1")
    if "hosts" in given and "hostfile" in given:
        raise ValueError("hosts and hostfile are both given; give one of them")
    if "hosts" in given:
        check_slots(parse_hosts(given["hosts"]), given.get("num_proc", 0))
    elif "hostfile" in given:
        check_slots(parse_host_file(given["hostfile"]), given.get("num_proc", 0))


def _add_deprecated(given: Mapping[str, Any], found: Translation) -> None:
    single = given.get("network_interface", [])
    interfaces = [name for text in [given.get("network_interfaces", ""), *single] for name in text.split(",") if name]
    if interfaces:
        found.options.append(f"--network-interfaces={','.join(interfaces)}")
    if any("," in text for text in single):
        found.notes.append("several names in --network-interface are deprecated; use --network-interfaces")
    if "log_hide_timestamp" in given:
        flag = "--log-without-timestamp" if given["log_hide_timestamp"] else "--log-with-timestamp"
        found.options.append(flag)
        found.notes.append(f"--log-hide-timestamp is deprecated; use {flag}")


def _add_notes(given: Mapping[str, Any], found: Translation) -> None:
    for name, (flag, reason) in WITHOUT_MEANING.items():
        if name in given and (given[name] or name not in _ONLY_ON):
            found.notes.append(f"{flag} means nothing here: {reason}")
    if any(name in given for name in _SEARCH):
        found.notes.append("--autotune-... means nothing here: the search itself (--autotune) is not there yet")
