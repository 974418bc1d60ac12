"""Functions of Horovod's launcher that programs import: parsed arguments, their variables, hosts and ranks."""

from __future__ import annotations

import pytest

from horovod.runner import launch
from horovod.runner.common.util import config_parser, hosts

FLAGS_AND_VARIABLES = [
    ("", {}),
    ("--fusion-threshold-mb 10 --cycle-time-ms 20", {"FUSION_THRESHOLD": str(10 << 20), "CYCLE_TIME": "20.0"}),
    ("--cache-capacity 512 --hierarchical-allreduce", {"CACHE_CAPACITY": "512", "HIERARCHICAL_ALLREDUCE": "1"}),
    ("--no-hierarchical-allgather --torus-allreduce", {"HIERARCHICAL_ALLGATHER": "0", "TORUS_ALLREDUCE": "1"}),
    ("--autotune --autotune-log-file f", {"AUTOTUNE": "1", "AUTOTUNE_LOG": "f"}),
    ("--autotune-log-file f --autotune-warmup-samples 3", {}),
    ("--timeline-filename t --timeline-mark-cycles", {"TIMELINE": "t", "TIMELINE_MARK_CYCLES": "1"}),
    ("--timeline-mark-cycles", {}),
    ("--no-stall-check", {"STALL_CHECK_DISABLE": "1"}),
    ("--stall-check", {"STALL_CHECK_DISABLE": "0"}),
    (
        "--stall-check-warning-time-seconds 10 --stall-check-shutdown-time-seconds 20",
        {"STALL_CHECK_TIME_SECONDS": "10", "STALL_SHUTDOWN_TIME_SECONDS": "20"},
    ),
    ("--mpi-threads-disable --num-nccl-streams 2", {"MPI_THREADS_DISABLE": "1", "NUM_NCCL_STREAMS": "2"}),
    ("--thread-affinity 1 --gloo-timeout-seconds 60", {"THREAD_AFFINITY": "1", "GLOO_TIMEOUT_SECONDS": "60"}),
    ("--log-level INFO --log-without-timestamp", {"LOG_LEVEL": "INFO", "LOG_HIDE_TIME": "1"}),
    ("--log-with-timestamp", {"LOG_HIDE_TIME": "0"}),
    ("--log-hide-timestamp", {"LOG_HIDE_TIME": "1"}),
    ("--no-log-hide-timestamp", {"LOG_HIDE_TIME": "0"}),
]


@pytest.mark.parametrize(("arguments", "variables"), FLAGS_AND_VARIABLES)
def test_variables_match_the_flags(arguments: str, variables: dict[str, str]) -> None:
    """Those of Horovod; nothing for a flag that was not given."""
    args = launch.parse_args(["-np", "2", *arguments.split()])
    env: dict[str, str] = {}
    assert config_parser.set_env_from_args(env, args) is env
    assert env == {f"HOROVOD_{name}": value for name, value in variables.items()}


def test_variables_of_networks() -> None:
    args = launch.parse_args(["--network-interface", "eth1", "--network-interfaces", "eth0,10.0.0.0/8", "--tcp"])
    assert args.nics == {"eth0", "eth1", "10.0.0.0/8"}
    assert config_parser.set_env_from_args({}, args) == {
        "HOROVOD_GLOO_IFACE": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0,eth1",
        "NCCL_IB_DISABLE": "1",
    }


def test_parsed_arguments_have_horovods_names() -> None:
    given = ["-np", "4", "--min-np", "2", "--max-np", "8", "--slots-per-host", "3", "--mpi", "--tcp"]
    args = launch.parse_args([*given, "--blacklist-cooldown-range", "1", "2", "python", "train.py", "-np", "1"])
    assert (args.num_proc, args.min_num_proc, args.max_num_proc, args.slots) == (4, 2, 8, 3)
    assert (args.cooldown_range, args.use_mpi, args.tcp_flag) == ([1, 2], True, True)
    assert args.command == ["python", "train.py", "-np", "1"]
    unset = [args.use_gloo, args.nics, args.hosts, args.verbose, args.no_stall_check, args.log_with_timestamp]
    assert not any(unset)


@pytest.mark.parametrize("arguments", ["--fusion-threshold-mb -1", "--autotune-gaussian-process-noise 1.1"])
def test_numbers_out_of_range_are_value_errors(arguments: str) -> None:
    with pytest.raises(ValueError, match=r"argument --.*: '.*' is not a"):
        launch.parse_args(["-np", "2", *arguments.split()])


def test_ranks_are_assigned_to_hosts() -> None:
    assigned = hosts.get_host_assignments(hosts.parse_hosts("a:3,b:1"), 2)
    assert [(each.hostname, each.rank, each.local_rank, each.cross_rank) for each in assigned] == [
        ("a", 0, 0, 0),
        ("a", 1, 1, 0),
        ("a", 2, 2, 0),
        ("b", 3, 0, 1),
    ]
    assert [(each.size, each.local_size, each.cross_size) for each in assigned] == [
        (4, 3, 2),
        (4, 3, 1),
        (4, 3, 1),
        (4, 1, 2),
    ]
    assert len(hosts.get_host_assignments(hosts.parse_hosts("a:3,b:1"), 2, 2)) == 2
    with pytest.raises(ValueError, match="Requested more processes"):
        hosts.get_host_assignments(hosts.parse_hosts("a:1"), 2)
    assert hosts.parse_hosts_and_slots("a:1,b:2") == (["a", "b"], {"a": 1, "b": 2})
