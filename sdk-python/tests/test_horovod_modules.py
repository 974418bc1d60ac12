"""The modules of `horovod`: the names that scripts take from them, and that they are ronde's own objects."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import ronde_binary

pytest.importorskip("torch")

import horovod
import horovod.torch as hvd
import ronde
import ronde.data
import ronde.elastic
import ronde.torch
import ronde.torch.elastic
from horovod.common import basics, exceptions, util

# What `horovod.torch` of release 0.28 has.
COLLECTIVES = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
OTHERS = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "ProcessSet",
    "SyncBatchNorm",
    "add_process_set",
    "elastic",
    "global_process_set",
    "remove_process_set",
]
PLACES = {
    "mpi_ops": [
        "allreduce",
        "allgather",
        "broadcast",
        "alltoall",
        "reducescatter",
        "init",
        "rank",
        "size",
        "join",
        "Average",
        "Adasum",
    ],
    "functions": ["broadcast_object", "broadcast_parameters", "broadcast_optimizer_state", "allgather_object"],
    "optimizer": ["DistributedOptimizer"],
    "compression": ["Compression"],
    "sync_batch_norm": ["SyncBatchNorm"],
}


def test_every_name_of_the_release_is_there() -> None:
    names = [*COLLECTIVES, *OTHERS, *basics.NAMES]
    assert [name for name in names if not hasattr(hvd, name)] == []
    assert set(names) - {"is_homogeneous"} <= set(hvd.__all__)


def test_names_of_horovod_are_the_objects_of_ronde() -> None:
    # The module `elastic` has a place of its own below `horovod.torch`.
    for name in set(ronde.torch.__all__) - {"elastic"}:
        assert getattr(hvd, name) is getattr(ronde.torch, name)
    for module, names in PLACES.items():
        found = importlib.import_module(f"horovod.torch.{module}")
        assert getattr(hvd, module) is found, "as an attribute of what a script has imported"
        for name in names:
            assert getattr(found, name) is getattr(hvd, name), (module, name)
    assert importlib.import_module("horovod.data").AsyncDataLoaderMixin is ronde.data.AsyncDataLoaderMixin
    assert importlib.import_module("horovod.data.data_loader_base").BaseDataLoader is ronde.data.BaseDataLoader
    assert importlib.import_module("horovod.common.process_sets").ProcessSet is hvd.ProcessSet
    assert importlib.import_module("horovod.common.elastic").State is ronde.elastic.State
    assert hvd.elastic.TorchState is ronde.torch.elastic.TorchState
    assert importlib.import_module("horovod.torch.elastic.state").TorchState is ronde.torch.elastic.TorchState
    sampler = importlib.import_module("horovod.torch.elastic.sampler").ElasticSampler
    assert hvd.elastic.ElasticSampler is sampler
    assert issubclass(sampler, ronde.torch.elastic.ElasticSampler), "with `rank` and `size` of its own module"
    assert importlib.import_module("horovod.runner").run is horovod.run


def test_exceptions() -> None:
    assert exceptions.HorovodInternalError is hvd.HorovodInternalError
    assert issubclass(exceptions.HorovodInternalError, RuntimeError)
    assert exceptions.HostsUpdatedInterrupt is ronde.elastic.HostsUpdatedInterrupt
    assert exceptions.HostsUpdatedInterrupt(skip_sync=True).skip_sync is True
    error = exceptions.HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "1.0", "2.0")


@pytest.mark.skipif(
    importlib.util.find_spec("mxnet") is not None, reason="MXNet is installed; test_mxnet.py imports it"
)
@pytest.mark.parametrize("name", ["horovod.mxnet", "ronde.mxnet"])
def test_the_error_without_mxnet_names_the_command(name: str) -> None:
    with pytest.raises(ImportError, match=r"needs MXNet, .*: pip install .* \(the extra `mxnet` of ronde's wheel\)"):
        importlib.import_module(name)


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is not None, reason="Lightning is installed; tests/frontends trains with it"
)
def test_the_error_without_lightning_names_the_command() -> None:
    pytest.importorskip("torch")
    command = r'pip install "torch>=2.1" "lightning>=2.2" \(the extra `lightning` of ronde\'s wheel\)'
    with pytest.raises(ImportError, match=rf"needs Lightning, which is not installed: {command}"):
        importlib.import_module("ronde.lightning")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed; tests/ray imports these")
@pytest.mark.parametrize("name", ["horovod.ray", "ronde.ray"])
def test_the_error_without_ray_names_the_command(name: str) -> None:
    with pytest.raises(
        ImportError, match=r'needs Ray, .*: pip install "ray\[train\]" \(the extra `ray` of ronde\'s wheel\)'
    ):
        importlib.import_module(name)


@pytest.mark.skipif(importlib.util.find_spec("pyspark") is not None, reason="PySpark is installed; see tests/spark")
@pytest.mark.parametrize("name", ["horovod.spark", "ronde.spark"])
def test_the_error_without_spark_names_the_command(name: str) -> None:
    with pytest.raises(ImportError, match=r"needs PySpark .*: pip install pyspark pyarrow \(the extra `spark` of"):
        importlib.import_module(name)


def test_horovod_basics_has_the_functions() -> None:
    found = basics.HorovodBasics("/some/where", "mpi_lib")
    assert found.size is hvd.size
    assert found.Adasum == hvd.Adasum
    assert found.mpi_built() is hvd.mpi_built()
    assert set(basics.NAMES) <= set(dir(found))
    with pytest.raises(AttributeError, match="HorovodBasics has no nothing"):
        _ = found.nothing
    with pytest.raises(ValueError, match="has not been initialized"):
        found.rank()


WITHOUT_PYTORCH = """
import sys
sys.modules["torch"] = None  # importing it raises ImportError
from horovod.common.basics import HorovodBasics
from horovod.common.elastic import State
from horovod.common.process_sets import ProcessSet, global_process_set
basics = HorovodBasics()
basics.init()
print(basics.rank(), basics.size(), basics.Sum, ProcessSet([0]).included(), global_process_set.size())
"""


def test_the_common_modules_need_no_pytorch() -> None:
    """As in an environment that has TensorFlow only."""
    ronde_binary()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTORCH], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"0 1 {ronde.Sum} True 1\n"), done.stderr


def test_utility_functions() -> None:
    assert [number for number in range(-1, 10) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    assert util.split_list(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert util.split_list([1], 2) == [[1], []]
    assert (util.is_iterable([]), util.is_iterable(1)) == (True, False)
    assert util.extension_available("torch")
    assert not util.gpu_available("mxnet")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib")
    util.check_extension("horovod.mxnet")
    with pytest.raises(ImportError, match=r"horovod\.caffe is not there"):
        util.check_extension("horovod.caffe")


def test_variables_are_set_temporarily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_TEST_OLD", "old")
    with util.env(RONDE_TEST_OLD=None, RONDE_TEST_NEW="new"):
        assert ("RONDE_TEST_OLD" in os.environ, os.environ["RONDE_TEST_NEW"]) == (False, "new")
    assert (os.environ["RONDE_TEST_OLD"], "RONDE_TEST_NEW" in os.environ) == ("old", False)
