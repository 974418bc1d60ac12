"""Reads flags of Horovod's launcher from a configuration file, checks them, and exports them to workers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Callable

from horovod.runner import config_file

if TYPE_CHECKING:
    import argparse
    from collections.abc import Container, Mapping, MutableMapping

HOROVOD_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
HOROVOD_CYCLE_TIME = "HOROVOD_CYCLE_TIME"
HOROVOD_CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
HOROVOD_HIERARCHICAL_ALLREDUCE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
HOROVOD_HIERARCHICAL_ALLGATHER = "HOROVOD_HIERARCHICAL_ALLGATHER"
HOROVOD_TORUS_ALLREDUCE = "HOROVOD_TORUS_ALLREDUCE"
HOROVOD_AUTOTUNE = "HOROVOD_AUTOTUNE"
HOROVOD_AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"
HOROVOD_AUTOTUNE_WARMUP_SAMPLES = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES = "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
HOROVOD_TIMELINE_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
HOROVOD_STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
HOROVOD_STALL_CHECK_TIME_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
HOROVOD_MPI_THREADS_DISABLE = "HOROVOD_MPI_THREADS_DISABLE"
HOROVOD_NUM_NCCL_STREAMS = "HOROVOD_NUM_NCCL_STREAMS"
HOROVOD_THREAD_AFFINITY = "HOROVOD_THREAD_AFFINITY"
HOROVOD_GLOO_TIMEOUT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
HOROVOD_GLOO_IFACE = "HOROVOD_GLOO_IFACE"
HOROVOD_LOG_LEVEL = "HOROVOD_LOG_LEVEL"
HOROVOD_LOG_HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"
NCCL_IB_DISABLE = "NCCL_IB_DISABLE"

# Variables, and the flags that set them.
_PLAIN = {
    HOROVOD_CYCLE_TIME: "cycle_time_ms",
    HOROVOD_CACHE_CAPACITY: "cache_capacity",
    HOROVOD_HIERARCHICAL_ALLREDUCE: "hierarchical_allreduce",
    HOROVOD_HIERARCHICAL_ALLGATHER: "hierarchical_allgather",
    HOROVOD_TORUS_ALLREDUCE: "torus_allreduce",
    HOROVOD_STALL_CHECK_DISABLE: "no_stall_check",
    HOROVOD_STALL_CHECK_TIME_SECONDS: "stall_check_warning_time_seconds",
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: "stall_check_shutdown_time_seconds",
    HOROVOD_MPI_THREADS_DISABLE: "mpi_threads_disable",
    HOROVOD_NUM_NCCL_STREAMS: "num_nccl_streams",
    HOROVOD_THREAD_AFFINITY: "thread_affinity",
    HOROVOD_GLOO_TIMEOUT_SECONDS: "gloo_timeout_seconds",
    HOROVOD_LOG_LEVEL: "log_level",
}
# The others are exported only if the first one's flag is given, or on.
_AUTOTUNE = {
    HOROVOD_AUTOTUNE: "autotune",
    HOROVOD_AUTOTUNE_LOG: "autotune_log_file",
    HOROVOD_AUTOTUNE_WARMUP_SAMPLES: "autotune_warmup_samples",
    HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE: "autotune_steps_per_sample",
    HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES: "autotune_bayes_opt_max_samples",
    HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE: "autotune_gaussian_process_noise",
}
_TIMELINE = {HOROVOD_TIMELINE: "timeline_filename", HOROVOD_TIMELINE_MARK_CYCLES: "timeline_mark_cycles"}
# ronde's flag also accepts networks, which these variables cannot express.
_INTERFACE = re.compile(r"[A-Za-z][\w.-]*")


def set_env_from_args(env: MutableMapping[str, str], args: argparse.Namespace) -> MutableMapping[str, str]:
    """Adds the variables of the flags in `args`, from `parse_args`, to `env`. Returns `env`."""
    names = dict(_PLAIN)
    names.update(_AUTOTUNE if getattr(args, "autotune", None) else {})
    names.update(_TIMELINE if getattr(args, "timeline_filename", None) else {})
    for variable, name in names.items():
        _add(env, variable, getattr(args, name, None))
    _add(env, HOROVOD_FUSION_THRESHOLD, getattr(args, "fusion_threshold_mb", None), lambda megabytes: megabytes << 20)
    _add(env, HOROVOD_LOG_HIDE_TIME, getattr(args, "log_with_timestamp", None), lambda with_time: not with_time)
    _add(env, HOROVOD_LOG_HIDE_TIME, getattr(args, "log_hide_timestamp", None))
    interfaces = sorted(name for name in getattr(args, "nics", None) or () if _INTERFACE.fullmatch(name))
    if interfaces:
        env[HOROVOD_GLOO_IFACE], env[NCCL_SOCKET_IFNAME] = interfaces[0], ",".join(interfaces)
    if getattr(args, "tcp_flag", None):
        env[NCCL_IB_DISABLE] = "1"
    return env


def _add(
    env: MutableMapping[str, str], variable: str, value: Any, convert: Callable[[Any], Any] = lambda value: value
) -> None:
    if value is not None:
        value = convert(value)
        env[variable] = str(int(value) if isinstance(value, bool) else value)


def set_args_from_config(args: argparse.Namespace, config: Mapping[str, Any], override_args: Container[str]) -> None:
    """Sets the attributes of `args` that a configuration file contains.

    config        -- the parsed YAML: sections of settings by name; unknown names are ignored
    override_args -- the names of attributes to keep, because the command line contains them

    Raises ValueError for a controller that is not gloo or mpi.
    """
    controller = config.get("controller")
    if controller is not None:
        if str(controller).lower() not in config_file.CONTROLLERS:
            raise ValueError(f"No such controller supported: {controller}")
        if not any(name in override_args for name in ("use_gloo", "use_mpi", "use_jsrun")):
            setattr(args, f"use_{controller.lower()}", True)
    for (section, key), flag in config_file.FLAGS.items():
        value = (config.get(section) or {}).get(key)
        name = flag.strip("-").replace("-", "_")
        if (section, key) == ("stall_check", "enabled"):
            name, value = "no_stall_check", None if value is None else not value
        if value is not None and name not in override_args:
            setattr(args, name, value)


def validate_config_args(args: argparse.Namespace) -> None:
    """Raises ValueError for a number of `args` that is negative, and for a noise that is not from 0 to 1."""
    for name in _NOT_NEGATIVE:
        value = getattr(args, name, None)
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} must be >= 0")
    noise = getattr(args, "autotune_gaussian_process_noise", None)
    if noise is not None and not 0 <= noise <= 1:
        raise ValueError(f"autotune_gaussian_process_noise={noise} must be in [0, 1]")


_NOT_NEGATIVE = (
    "fusion_threshold_mb",
    "cycle_time_ms",
    "cache_capacity",
    "autotune_warmup_samples",
    "autotune_steps_per_sample",
    "autotune_bayes_opt_max_samples",
    "stall_check_warning_time_seconds",
    "stall_check_shutdown_time_seconds",
    "num_nccl_streams",
    "thread_affinity",
    "gloo_timeout_seconds",
)
