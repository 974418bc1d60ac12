"""Names of Horovod's modules for Spark: they work, or raise an error with what to use instead."""

from __future__ import annotations

import inspect
import pathlib
from typing import Any

import numpy
import pyarrow
import pytest
from coverage_names import check_imports
from horovod.spark import conf
from horovod.spark.common import util
from horovod.spark.common.params import EstimatorParams, ModelParams
from horovod.spark.common.store import AbstractFilesystemStore, DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore
from horovod.spark.data_loaders.pytorch_data_loaders import PetastormBatchedDataLoader
from horovod.spark.keras import KerasEstimator, KerasModel
from horovod.spark.lightning import TorchEstimator as LightningEstimator
from horovod.spark.lightning import TorchModel as LightningModel
from horovod.spark.torch import TorchEstimator, TorchModel
from pyspark.ml.linalg import DenseVector, VectorUDT
from pyspark.sql import types
from ronde.spark.common.keywords import EstimatorKeywords, ModelKeywords
from ronde.spark.keras.estimator import KerasKeywords, KerasModelKeywords
from ronde.spark.lightning.estimator import LightningKeywords
from ronde.spark.torch.estimator import TorchKeywords, TorchModelKeywords

SHARED = """
    num_proc model backend store optimizer loss metrics loss_weights sample_weight_col gradient_compression feature_cols
    validation label_cols callbacks batch_size val_batch_size epochs verbose random_seed shuffle_buffer_size shuffle
    partitions_per_process run_id train_steps_per_epoch validation_steps_per_epoch transformation_fn
    train_reader_num_workers val_reader_num_workers reader_pool_type label_shapes inmemory_cache_all use_gpu
    mp_start_method data_module
"""
OF_TORCH = """
    continuous_cols categorical_cols loss_constructors input_shapes train_minibatch_fn backward_passes_per_step
"""
OF_KERAS = """
    custom_objects continuous_cols categorical_cols checkpoint_callback backend_env
    tensorflow_dataset_prefetch_buffer_size
"""
OF_LIGHTNING = """
    loss_constructors input_shapes train_minibatch_fn transformation_edit_fields transformation_removed_fields
    trainer_args num_gpus logger log_every_n_steps loader_num_epochs terminate_on_nan profiler debug_data_loader
    train_async_data_loader_queue_size val_async_data_loader_queue_size
"""
OF_MODELS = "history model feature_columns label_columns run_id _metadata"
OF_TORCH_MODELS = "input_shapes optimizer loss loss_constructors"


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (TorchEstimator, SHARED + OF_TORCH),
        (KerasEstimator, SHARED + OF_KERAS),
        (LightningEstimator, SHARED + OF_LIGHTNING),
        (TorchModel, f"{OF_MODELS} {OF_TORCH_MODELS}"),
        (KerasModel, f"{OF_MODELS} custom_objects _floatx"),
        (LightningModel, f"{OF_MODELS} {OF_TORCH_MODELS}"),
    ],
)
def test_constructors_have_horovods_arguments(kind: Any, wanted: str) -> None:
    for found in (inspect.signature(kind).parameters, inspect.signature(kind.__init__).parameters):
        assert set(wanted.split()) <= set(found)
        assert all(found[name].kind is inspect.Parameter.KEYWORD_ONLY for name in wanted.split())
    made = kind()
    for name, parameter in inspect.signature(kind).parameters.items():
        assert made.getOrDefault(getattr(made, name)) == parameter.default
    with pytest.raises(TypeError, match=f"{kind.__name__} has no parameter 'typo'"):
        kind(typo=1)


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        (EstimatorParams, EstimatorKeywords),
        (ModelParams, ModelKeywords),
        (TorchEstimator, TorchKeywords),
        (KerasEstimator, KerasKeywords),
        (LightningEstimator, LightningKeywords),
        (TorchModel, TorchModelKeywords),
        (KerasModel, KerasModelKeywords),
    ],
)
def test_type_checkers_know_all_parameters(kind: Any, keywords: Any) -> None:
    assert set(keywords.__annotations__) == set(kind.SETTINGS)


ACCESSORS = """
    NumProc Model Backend Store Loss LossWeights SampleWeightCol Metrics FeatureCols LabelCols ContinuousCols
    CategoricalCols Validation Callbacks BatchSize ValBatchSize Epochs TrainStepsPerEpoch ValidationStepsPerEpoch
    Verbose GradientCompression CompressSparseCols RandomSeed ShufflingBufferSize Shuffle Optimizer
    PartitionsPerProcess RunId TransformationFn TransformationEditFields TransformationRemovedFields
    TrainReaderNumWorker ValReaderNumWorker ReaderPoolType LabelShapes InMemoryCacheAll UseGpu MpStartMethod
"""


def test_setters_and_getters_have_horovods_names() -> None:
    for kind, further in (
        (TorchEstimator, ["BackwardPassesPerStep", "InputShapes", "LossConstructors", "TrainMinibatchFn"]),
        (KerasEstimator, ["TensorflowDatasetPrefetchBufferSize", "CustomObjects", "CheckpointCallback", "BackendEnv"]),
        (LightningEstimator, ["TrainerArgs", "Logger", "LogEveryNSteps", "Profiler", "TerminateOnNan"]),
    ):
        for name in (*ACCESSORS.split(), *further):
            assert callable(getattr(kind, f"set{name}"))
            assert callable(getattr(kind, f"get{name}"))
    for kind in (TorchModel, KerasModel, LightningModel):
        for name in ("History", "Model", "FeatureColumns", "LabelColoumns", "RunId", "OutputCols"):
            assert callable(getattr(kind, f"set{name}"))
            assert callable(getattr(kind, f"get{name}"))


def test_types_have_horovods_names() -> None:
    assert util.data_type_to_str(types.DoubleType) == "Double"
    assert util.data_type_to_str(VectorUDT()) == util.data_type_to_str(DenseVector) == "Vector"
    assert util.numpy_type_to_str(numpy.int64) == "Long"
    assert util.spark_scalar_to_python_type(types.BooleanType) is bool
    assert util.data_type_to_numpy(types.ArrayType(types.IntegerType())) is numpy.float64
    assert util.data_type_to_numpy(types.FloatType()) is numpy.float32
    assert util.pyarrow_to_spark_data_type(pyarrow.list_(pyarrow.float32())) is DenseVector
    assert util.pyarrow_to_spark_data_type(pyarrow.int32()) is types.IntegerType
    for refused in (util.data_type_to_str, util.spark_scalar_to_python_type, util.data_type_to_numpy):
        with pytest.raises(ValueError, match="Unrecognized data type"):
            refused(types.DateType)
    with pytest.raises(ValueError, match="Unrecognized data type"):
        util.numpy_type_to_str(numpy.complex64)


def test_small_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert util.to_list(None, 2) is None
    assert util.to_list("mse", 2) == ["mse", "mse"]
    assert util.to_list([1, 2], 2) == [1, 2]
    with pytest.raises(ValueError, match="the list has 1 values instead of 2"):
        util.to_list([1], 2)
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    assert not util.is_databricks()
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "15.4")
    assert util.is_databricks()
    assert util.host_hash() == util.host_hash()
    assert util.host_hash("salt") != util.host_hash()


def test_what_is_refused_names_an_alternative() -> None:
    with pytest.raises(RuntimeError, match="Petastorm, which horovod-compat does not use"):
        util.to_petastorm_fn([], {})
    with pytest.raises(RuntimeError, match=r"call get_simple_meta_from_parquet\(.*dataset_idx=3\)"):
        util.get_dataset_properties(3)
    with pytest.raises(RuntimeError, match=r"PytorchDataLoader\(ronde\.spark\.data\.ShardReader"):
        PetastormBatchedDataLoader(None)


def test_settings_are_names_and_values_of_spark() -> None:
    found = {name: value for name, value in vars(conf).items() if name.startswith("SPARK_CONF_")}
    pairs = {name: value for name, value in found.items() if isinstance(value, tuple)}
    assert all(len(pair) == 2 and pair[0].startswith("spark.") for pair in pairs.values())
    assert {pair[0] for pair in pairs.values()} >= set(conf.SPARK_CONF_DEFAULT_VALUES)
    for name, (setting, _) in pairs.items():
        if "_DONT_REUSE_FAIL" in name:
            assert pairs[name.replace("_DONT", "")] == (setting, conf.SPARK_CONF_MAX_INT)


def test_stores_match_the_paths_that_are_theirs(tmp_path: pathlib.Path) -> None:
    for kind, path in (
        (LocalStore, "/a"),
        (LocalStore, "file:///a"),
        (HDFSStore, "hdfs://namenode:8020/a"),
        (FilesystemStore, "s3a://bucket/a"),
    ):
        kinds = (LocalStore, HDFSStore, FilesystemStore, DBFSLocalStore)
        assert [each for each in kinds if each.matches(path)] == [kind]
        assert issubclass(kind, AbstractFilesystemStore)
        derived = [type("Derived", (each,), {}) for each in kinds]
        assert [each.__bases__ for each in derived if each.matches(path)] == [(kind,)]
    assert DBFSLocalStore.matches("dbfs:/a")
    store = LocalStore(str(tmp_path))
    assert store.get_full_path_fn()("/b") == "file:///b"
    with store.get_local_output_dir_fn("run")() as folder:
        assert pathlib.Path(folder).is_dir()
    assert store.get_checkpoints("run") == []
    store.write_text(f"{store.get_run_path('run')}/b.ckpt", "two")
    store.write_text(f"{store.get_run_path('run')}/a.ckpt", "one")
    store.write_text(f"{store.get_run_path('run')}/a.txt", "text")
    assert store.get_checkpoints("run") == [f"{store.get_run_path('run')}/{name}.ckpt" for name in "ab"]
    assert store.read(store.get_checkpoints("run")[0]) == b"one"


def test_names_of_the_page_of_coverage_have_their_parameters() -> None:
    check_imports("horovod.spark")
