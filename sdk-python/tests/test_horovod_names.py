"""The names in modules of `horovod` that users' programs import; most of them are called."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from typing import Any, Callable

import pytest
from conftest import PACKAGE

pytest.importorskip("torch")

import torch

import horovod.torch as hvd
from horovod.common import elastic, exceptions, util
from horovod.torch import mpi_ops, optimizer
from ronde.elastic import HostsUpdatedInterrupt, HostUpdateResult, ObjectState

COMPAT = PACKAGE.parent / "horovod-compat" / "src"
# Module, and the names that Horovod 0.28 has there.
NAMES = {
    "horovod.common.util": "EXTENSIONS _cache ccl_built check_extension check_installed_version ddl_built env "
    "extension_available get_average_backwards_compatibility_fun get_ext_suffix get_extension_full_path gloo_built "
    "gpu_available is_iterable is_version_greater_equal_than mpi_built nccl_built num_rank_is_power_2 split_list",
    "horovod.common.elastic": "HorovodInternalError HostUpdateResult HostsUpdatedInterrupt ObjectState State "
    "WorkerNotificationManager notification_manager run_fn",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.exceptions": "HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt",
    "horovod.common.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "horovod.torch": "AdaSum Adasum Average Compression DistributedOptimizer SyncBatchNorm elastic mpi_ops",
    "horovod.torch.mpi_ops": "Adasum Average HorovodAllgather HorovodAllreduce HorovodAlltoall HorovodBroadcast "
    "HorovodGroupedAllgather HorovodGroupedAllreduce HorovodGroupedReducescatter HorovodReducescatter _basics "
    "handle_average_backwards_compatibility poll synchronize",
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedAdasumOptimizer _DistributedOptimizer",
    "horovod.torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "horovod.torch.elastic": "ElasticSampler TorchState reset run run_fn sampler state",
    "horovod.torch.elastic.state": "ElasticSampler ModelStateHandler ObjectState OptimizerStateHandler "
    "SamplerStateHandler StateHandler TorchState broadcast_object broadcast_optimizer_state broadcast_parameters "
    "get_handler_registry rank set_handler_registry",
    "horovod.torch.elastic.sampler": "ElasticSampler rank size",
    "horovod.runner": "run",
    "horovod.runner.launch": "_HorovodArgs _run _run_elastic parse_args run_commandline",
    "horovod.runner.common.util.codec": "dumps_base64 loads_base64",
    "horovod.runner.common.util.config_parser": "set_args_from_config set_env_from_args validate_config_args",
    "horovod.runner.common.util.env": "IGNORE_REGEXES KUBEFLOW_MPI_EXEC LOG_LEVEL_STR get_env_rank_and_size "
    "is_exportable",
    "horovod.runner.common.util.host_hash": "host_hash",
    "horovod.runner.common.util.hosts": "HostInfo INVALID_SLOT_INFO SlotInfo get_host_assignments parse_host_files "
    "parse_hosts parse_hosts_and_slots",
    "horovod.runner.common.util.safe_shell_exec": "GRACEFUL_TERMINATION_TIME_S execute forward_stream prefix_stream "
    "terminate_executor_shell_and_children",
    "horovod.runner.common.util.secret": "DIGEST_LENGTH HOROVOD_SECRET_KEY SECRET_LENGTH check_digest compute_digest "
    "make_secret_key",
    "horovod.runner.common.util.settings": "BaseSettings Settings",
    "horovod.runner.common.util.timeout": "Timeout TimeoutException",
    "horovod.runner.common.util.tiny_shell_exec": "execute",
    "horovod.runner.elastic.constants": "DISCOVER_HOSTS_FREQUENCY_SECS ELASTIC_TIMEOUT_SECS "
    "RESET_LIMIT_EXCEEDED_MESSAGE",
    "horovod.runner.elastic.discovery": "DiscoveredHosts FixedHosts HostDiscovery HostDiscoveryScript HostManager "
    "HostState",
    "horovod.runner.elastic.driver": "DISCOVER_HOSTS_FREQUENCY_SECS ELASTIC_TIMEOUT_SECS ElasticDriver Results "
    "ResultsRecorder",
    "horovod.runner.elastic.registration": "FAILURE READY SUCCESS WorkerStateRegistry",
    "horovod.runner.elastic.rendezvous": "create_rendezvous_handler",
    "horovod.runner.elastic.settings": "ElasticSettings",
    "horovod.runner.elastic.worker": "HostUpdateResult HostsUpdatedRequest WorkerNotificationClient "
    "WorkerNotificationManager WorkerNotificationService",
    "horovod.runner.http.http_client": "put_data_into_kvstore read_data_from_kvstore",
    "horovod.runner.http.http_server": "RendezvousServer",
    "horovod.runner.util.cache": "Cache use_cache",
    "horovod.runner.util.lsf": "LSFUtils",
    "horovod.runner.util.network": "filter_local_addresses get_driver_ip get_local_host_addresses get_local_intfs "
    "resolve_host_address",
    "horovod.runner.util.remote": "SSH_COMMAND_PREFIX get_remote_command get_ssh_command",
    "horovod.runner.util.streams": "Pipe",
    "horovod.runner.util.threads": "execute_function_multithreaded in_thread on_event",
}
# Parameters as Horovod has them, by the function's name; `=` where one has a default.
SIGNATURES = {
    "horovod.common.util.check_installed_version": "name version exception=",
    "horovod.common.util.is_version_greater_equal_than": "ver target",
    "horovod.common.util.get_average_backwards_compatibility_fun": "reduce_ops",
    "horovod.common.util.gloo_built": "verbose=",
    "horovod.common.elastic.run_fn": "func reset",
    "horovod.runner.common.util.codec.dumps_base64": "obj to_ascii=",
    "horovod.runner.common.util.config_parser.set_args_from_config": "args config override_args",
    "horovod.runner.common.util.host_hash.host_hash": "salt=",
    "horovod.runner.common.util.safe_shell_exec.execute": "command env= stdout= stderr= index= events= "
    "prefix_output_with_timestamp=",
    "horovod.runner.common.util.settings.BaseSettings": "num_proc= verbose= ssh_port= ssh_identity_file= "
    "extra_mpi_args= tcp_flag= binding_args= key= start_timeout= output_filename= run_func_mode= nics= elastic= "
    "prefix_output_with_timestamp=",
    "horovod.runner.elastic.discovery.HostDiscoveryScript": "discovery_script default_slots=",
    "horovod.runner.elastic.discovery.HostManager": "discovery cooldown_range=",
    "horovod.runner.elastic.driver.ElasticDriver": "rendezvous discovery min_num_proc max_num_proc timeout= "
    "reset_limit= cooldown_range= verbose=",
    "horovod.runner.elastic.registration.WorkerStateRegistry": "driver host_manager reset_limit= verbose=",
    "horovod.runner.elastic.settings.ElasticSettings": "discovery min_num_proc max_num_proc elastic_timeout "
    "reset_limit cooldown_range= kwargs",
    "horovod.runner.common.util.timeout.Timeout": "timeout message",
    "horovod.runner.util.cache.Cache": "cache_folder cache_staleness_threshold_in_minutes parameters_hash",
    "horovod.runner.util.remote.get_ssh_command": "local_command host port= identity_file= timeout_s=",
    "horovod.runner.util.threads.in_thread": "target args= name= daemon= silent=",
    "horovod.runner.util.threads.on_event": "event func args= stop= check_stop_interval_s= daemon= silent=",
    "horovod.runner.util.threads.execute_function_multithreaded": "fn args_list block_until_all_done= "
    "max_concurrent_executions=",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_its_names(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("function", SIGNATURES)
def test_a_function_has_horovods_parameters(function: str) -> None:
    module, _, name = function.rpartition(".")
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    parameters = [
        f"{parameter.name}{'' if parameter.default is parameter.empty else '='}"
        for parameter in signature.parameters.values()
    ]
    assert " ".join(parameters) == SIGNATURES[function]


def test_modules_that_unpickle_network_input_are_absent() -> None:
    with pytest.raises(ImportError, match="its services unpickle what they receive over the network"):
        importlib.import_module("horovod.runner.common.util.network")


def test_aliases() -> None:
    assert hvd.AdaSum == hvd.Adasum
    assert elastic.HorovodInternalError is exceptions.HorovodInternalError is hvd.HorovodInternalError
    assert hvd.elastic is importlib.import_module("horovod.torch.elastic")
    assert hvd.elastic.state.TorchState is hvd.elastic.TorchState
    assert hvd.elastic.run_fn is elastic.run_fn
    assert hvd.max_size.__module__ == "ronde.frameworks.basics"


def test_the_samplers_rank_and_size_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.torch.elastic.sampler.rank", lambda: 1)
    monkeypatch.setattr("horovod.torch.elastic.sampler.size", lambda: 2)
    sampler = hvd.elastic.ElasticSampler(range(4), shuffle=False)
    assert list(sampler) == [1, 3]
    assert hvd.elastic.TorchState(sampler=sampler)._handlers["sampler"].value is sampler


def test_build_flags() -> None:
    found = [ask() for ask in (util.mpi_built, util.gloo_built, util.nccl_built, util.ddl_built, util.ccl_built)]
    assert found == [False, True, False, False, False]
    assert util.get_ext_suffix().endswith(".so")
    path = util.get_extension_full_path("/pkg/module.py", "native", "mpi_lib")
    assert path == f"/pkg/native/mpi_lib{util.get_ext_suffix()}"
    util.check_installed_version("torch", "1.0")
    with pytest.raises(ImportError, match="broken"):
        util.check_installed_version("torch", "1.0", ImportError("broken"))


def test_a_cached_function_is_called_once_for_each_argument() -> None:
    calls: list[int] = []
    cached = util._cache(lambda number: calls.append(number) or number * 2)
    assert [cached(1), cached(2), cached(1)] == [2, 4, 2]
    assert calls == [1, 2]


@pytest.mark.parametrize(
    ("ver", "target", "is_newer"),
    [
        ("2.1.0", "2.1.0", True),
        ("2.10.0", "2.9.0", True),
        ("2.1", "2.1.0", True),
        ("2.0.9", "2.1.0", False),
        ("2.1.0rc1", "2.1.0", False),
        ("2.1.0.dev20230101", "2.1.0", False),
        ("2.1.0a0+git", "2.1.0", False),
        ("2.1.0+cu118", "2.1.0", True),
        ("2.1.0.post1", "2.1.0", True),
        ("v2.1.0rc2", "2.1.0rc1", True),
    ],
)
def test_versions_are_compared(ver: str, target: str, is_newer: bool) -> None:
    assert util.is_version_greater_equal_than(ver, target) is is_newer


@pytest.mark.parametrize(("ver", "target"), [("2.1.0", "2.1"), (2, "2.1.0"), ("two", "2.1.0")])
def test_an_invalid_version_is_rejected(ver: Any, target: str) -> None:
    with pytest.raises(ValueError, match="version"):
        util.is_version_greater_equal_than(ver, target)


def test_average_is_deprecated() -> None:
    op_of = mpi_ops.handle_average_backwards_compatibility
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [op_of(None, None), op_of(hvd.Max, None)] == [hvd.Average, hvd.Max]
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert op_of(None, True) == hvd.Average
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert op_of(None, False) == hvd.Sum
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        op_of(hvd.Sum, True)


def test_mpi_ops_has_horovods_basics_object() -> None:
    assert mpi_ops._basics.is_initialized is hvd.is_initialized
    with pytest.raises(ValueError, match="has not been initialized"):
        mpi_ops._basics.rank()


def test_a_host_update_reaches_the_running_state() -> None:
    state = ObjectState(lambda value: value, lambda: 0, epoch=0)
    begun: list[str] = []

    def train(state: Any) -> int:
        if not begun:
            elastic.notification_manager.handle_hosts_updated(1.0, HostUpdateResult.added)
            elastic.notification_manager.init(rendezvous_addr="nowhere")
        state.epoch += 1
        state.commit()
        return int(state.epoch)

    assert elastic.run_fn(train, lambda: begun.append("again"))(state) == 2
    assert begun == ["again"]
    # The state of a training that has ended is not notified.
    elastic.notification_manager.handle_hosts_updated(2.0, HostUpdateResult.added)
    state.check_host_updates()
    elastic.notification_manager.register_listener(state)
    elastic.notification_manager.register_listener(state)
    elastic.notification_manager.handle_hosts_updated(3.0, HostUpdateResult.removed)
    elastic.notification_manager.remove_listener(state)
    elastic.notification_manager.remove_listener(state)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync
    state.check_host_updates()


def test_collectives_by_autograd_function_need_init() -> None:
    ones = torch.ones(2)
    everybody = hvd.global_process_set
    for call in (
        lambda: mpi_ops.HorovodAllreduce.apply(ones, None, "a", hvd.Sum, 1.0, 1.0, everybody),
        lambda: mpi_ops.HorovodGroupedAllreduce.apply(None, "b", hvd.Sum, 1.0, 1.0, everybody, ones),
        lambda: mpi_ops.HorovodAllgather.apply(ones, "c", everybody),
        lambda: mpi_ops.HorovodGroupedAllgather.apply("d", everybody, ones),
        lambda: mpi_ops.HorovodBroadcast.apply(ones, 0, "e", everybody),
        lambda: mpi_ops.HorovodAlltoall.apply(ones, None, "f", everybody),
        lambda: mpi_ops.HorovodReducescatter.apply(ones, "g", hvd.Sum, everybody, 1.0, 1.0),
        lambda: mpi_ops.HorovodGroupedReducescatter.apply("h", hvd.Sum, everybody, 1.0, 1.0, ones),
    ):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()


def test_classes_of_optimizers() -> None:
    assert issubclass(optimizer._DistributedOptimizer, torch.optim.Optimizer)
    assert issubclass(optimizer._DistributedAdasumOptimizer, torch.optim.Optimizer)


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_names_that_need_a_job(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    options = ["-x", f"PYTHONPATH={PACKAGE}{os.pathsep}{COMPAT}"]
    output = world("horovod_names.py", ranks, sidecars, options=options)
    assert output.count("the names of Horovod hold") == ranks
