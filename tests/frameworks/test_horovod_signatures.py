"""The functions of Horovod's modules for TensorFlow and Keras: names, parameters in their order, and defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from coverage_names import check_imports

pytest.importorskip("tensorflow")

import horovod.keras
import horovod.tensorflow
import horovod.tensorflow.keras

C0: Any = horovod.tensorflow.Compression.none
G: Any = horovod.tensorflow.global_process_set
AVERAGE = horovod.tensorflow.Average

BASICS = """
    init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
    mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built
    rocm_built is_homogeneous max_size Average Sum Compression global_process_set elastic
""".split()  # noqa: SIM905 -- readable
NAMES = {
    horovod.tensorflow: "Adasum Min Max Product ProcessSet add_process_set remove_process_set gpu_available "
    "SyncBatchNormalization BroadcastGlobalVariablesHook PartialDistributedGradientTape check_num_rank_power_of_2",
    horovod.tensorflow.keras: "ProcessSet add_process_set remove_process_set callbacks",
    horovod.keras: "Adasum PartialDistributedOptimizer callbacks",
}

_SCALES = {"prescale_factor": 1.0, "postscale_factor": 1.0}
_DEVICES = {"device_dense": "", "device_sparse": ""}
_REQUIRED = inspect.Parameter.empty
_NAMED = {"name": None, "ignore_name_scope": False, "process_set": G}
_TAPE = {
    "gradtape": _REQUIRED,
    **_DEVICES,
    "compression": C0,
    "sparse_as_dense": False,
    "op": AVERAGE,
    "gradient_predivide_factor": 1.0,
    "num_groups": 0,
    "groups": None,
    "process_set": G,
}
_KERAS_OPTIMIZER = {
    "optimizer": _REQUIRED,
    "name": None,
    **_DEVICES,
    "compression": C0,
    "sparse_as_dense": False,
    "gradient_predivide_factor": 1.0,
    "op": AVERAGE,
}
_LOAD = {
    "filepath": _REQUIRED,
    "custom_optimizers": None,
    "custom_objects": None,
    "compression": C0,
    "legacy_opts": False,
}
# Parameters after these are ronde's own, with defaults.
TENSORFLOW: dict[str, dict[str, Any]] = {
    "init": {"comm": None, "process_sets": None},
    "start_timeline": {"file_path": _REQUIRED, "mark_cycles": False},
    "allreduce": {
        "tensor": _REQUIRED,
        "average": None,
        **_DEVICES,
        "compression": C0,
        "op": None,
        **_SCALES,
        "name": None,
        "process_set": G,
        "ignore_name_scope": False,
    },
    "grouped_allreduce": {
        "tensors": _REQUIRED,
        "average": None,
        **_DEVICES,
        "compression": C0,
        "op": None,
        **_SCALES,
        "process_set": G,
        "ignore_name_scope": False,
        "name": None,
    },
    "reducescatter": {
        "tensor": _REQUIRED,
        "device_dense": "",
        "compression": C0,
        "op": AVERAGE,
        "name": None,
        "process_set": G,
        "ignore_name_scope": False,
        **_SCALES,
    },
    "grouped_reducescatter": {
        "tensors": _REQUIRED,
        "device_dense": "",
        "compression": C0,
        "op": AVERAGE,
        "process_set": G,
        **_SCALES,
    },
    "allgather": {"tensor": _REQUIRED, **_NAMED},
    "grouped_allgather": {"tensors": _REQUIRED, **_NAMED},
    "broadcast": {"tensor": _REQUIRED, "root_rank": _REQUIRED, **_NAMED},
    "broadcast_": {"variables": _REQUIRED, "root_rank": _REQUIRED, "name": None, "process_set": G},
    "alltoall": {"tensor": _REQUIRED, "splits": None, **_NAMED},
    "join": {},
    "rank_op": {"name": None},
    "local_rank_op": {"name": None},
    "local_size_op": {"name": None},
    "size_op": {"process_set_id": 0, "name": None},
    "process_set_included_op": {"process_set_id": 0, "name": None},
    "broadcast_variables": {"variables": _REQUIRED, "root_rank": _REQUIRED, "process_set": G, "inplace": False},
    "broadcast_global_variables": {"root_rank": _REQUIRED},
    "BroadcastGlobalVariablesHook": {"root_rank": _REQUIRED, "device": ""},
    "broadcast_object": {"obj": _REQUIRED, "root_rank": 0, "session": None, "name": None, "process_set": G},
    "broadcast_object_fn": {"root_rank": 0, "session": None, "name": None, "process_set": G},
    "allgather_object": {"obj": _REQUIRED, "session": None, "name": None, "process_set": G},
    "DistributedOptimizer": {
        "optimizer": _REQUIRED,
        "name": None,
        "use_locking": False,
        **_DEVICES,
        "compression": C0,
        "sparse_as_dense": False,
        "backward_passes_per_step": 1,
        "op": AVERAGE,
        "gradient_predivide_factor": 1.0,
        "average_aggregated_gradients": False,
        "num_groups": 0,
        "groups": None,
        "process_set": G,
        "scale_local_gradients": True,
    },
    "DistributedGradientTape": {**_TAPE, "scale_local_gradients": True},
    "PartialDistributedGradientTape": {**_TAPE, "local_layers": None, "scale_local_gradients": True},
    "add_process_set": {"process_set": _REQUIRED},
    "remove_process_set": {"process_set": _REQUIRED},
}
TF_KERAS: dict[str, dict[str, Any]] = {
    "DistributedOptimizer": {
        **_KERAS_OPTIMIZER,
        "backward_passes_per_step": 1,
        "average_aggregated_gradients": False,
        "num_groups": 0,
        "groups": None,
        "process_set": G,
        "scale_local_gradients": True,
    },
    "allreduce": {"value": _REQUIRED, "name": None, "average": None, **_SCALES, "op": None, "compression": C0},
    "allgather": {"value": _REQUIRED, "name": None},
    "broadcast": {"value": _REQUIRED, "root_rank": _REQUIRED, "name": None},
    "reducescatter": {"value": _REQUIRED, "name": None, "op": AVERAGE},
    "broadcast_global_variables": {"root_rank": _REQUIRED},
    "load_model": _LOAD,
}
KERAS: dict[str, dict[str, Any]] = {
    "DistributedOptimizer": {**_KERAS_OPTIMIZER, "num_groups": 0, "groups": None},
    "PartialDistributedOptimizer": {
        **_KERAS_OPTIMIZER,
        "backward_passes_per_step": 1,
        "average_aggregated_gradients": False,
        "groups": None,
        "process_set": G,
        "local_layers": None,
        "scale_local_gradients": True,
    },
    **{name: each for name, each in TF_KERAS.items() if name != "DistributedOptimizer"},
}
CALLBACKS: dict[str, dict[str, Any]] = {
    "BroadcastGlobalVariablesCallback": {"root_rank": _REQUIRED, "device": "", "local_variables": None},
    "MetricAverageCallback": {"device": ""},
    "LearningRateScheduleCallback": {
        "initial_lr": _REQUIRED,
        "multiplier": _REQUIRED,
        "start_epoch": 0,
        "end_epoch": None,
        "staircase": True,
        "momentum_correction": True,
        "steps_per_epoch": None,
    },
    "LearningRateWarmupCallback": {
        "initial_lr": _REQUIRED,
        "warmup_epochs": 5,
        "momentum_correction": True,
        "steps_per_epoch": None,
        "verbose": 0,
    },
    "BestModelCheckpoint": {
        "monitor": "val_loss",
        "verbose": 0,
        "save_weights_only": False,
        "mode": "auto",
        "save_freq": "epoch",
    },
}
ELASTIC: dict[str, dict[str, Any]] = {
    "run": {"func": _REQUIRED},
    "KerasState": {"model": _REQUIRED, "optimizer": None},
    "CommitStateCallback": {"state": _REQUIRED, "batches_per_commit": 1},
    "UpdateBatchStateCallback": {"state": _REQUIRED, "first_batch": 0},
    "UpdateEpochStateCallback": {"state": _REQUIRED},
}
TF_ELASTIC: dict[str, dict[str, Any]] = {
    "run": {"func": _REQUIRED},
    "TensorFlowKerasState": {"model": _REQUIRED, "optimizer": None, "backend": None},
    "TensorFlowState": {"variables": None, "session": None},
}
TABLES = [
    (horovod.tensorflow, TENSORFLOW),
    (horovod.tensorflow.elastic, TF_ELASTIC),
    (horovod.tensorflow.keras, TF_KERAS),
    (horovod.keras, KERAS),
    (horovod.tensorflow.keras.callbacks, CALLBACKS),
    (horovod.keras.callbacks, CALLBACKS),
    (horovod.tensorflow.keras.elastic, ELASTIC),
    (horovod.keras.elastic, ELASTIC),
]
CASES = [(module, name, table[name]) for module, table in TABLES for name in table]


@pytest.mark.parametrize(("module", "name", "expected"), CASES, ids=[f"{m.__name__}.{n}" for m, n, _ in CASES])
def test_parameters_are_horovods(module: Any, name: str, expected: dict[str, Any]) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    found = {each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD}
    assert list(found.items())[: len(expected)] == list(expected.items())
    assert _REQUIRED not in list(found.values())[len(expected) :]


@pytest.mark.parametrize("module", list(NAMES), ids=lambda module: module.__name__)
def test_names_are_horovods(module: Any) -> None:
    missing = [name for name in [*BASICS, *NAMES[module].split()] if not hasattr(module, name)]
    assert missing == []


@pytest.mark.parametrize("package", ["horovod.tensorflow", "horovod.keras"])
def test_names_of_the_page_of_coverage_have_their_parameters(package: str) -> None:
    check_imports(package)
