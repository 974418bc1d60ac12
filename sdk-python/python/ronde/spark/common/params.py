"""Parameters of estimators and their models, as those of Spark ML, with Horovod's names, setters and getters."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Callable, NamedTuple, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

from ronde.spark.common.backend import Backend
from ronde.spark.common.schema import check_validation
from ronde.spark.common.store import Store

Kind = TypeVar("Kind", bound=type)
POOLS_HINT = "'thread', 'process' or 'dummy'"


class Setting(NamedTuple):
    """A parameter.

    name     -- as an argument
    accessor -- what follows `set` and `get`
    doc      -- what it is
    check    -- returns the value, converted; raises TypeError or ValueError
    default  -- the value that it has if it is not set
    """

    name: str
    accessor: str
    doc: str
    check: Callable[[Any], Any] | None = None
    default: Any = None


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def at_least(least: int) -> Callable[[Any], Any]:
    """Returns the check of a whole number, which is at least `least`, or None."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or int(value) != value or value < least:
            raise ValueError(f"{value!r} is not a whole number of at least {least}")
        return int(value)

    return _optional(check)


def _names(value: Any) -> Any:
    if isinstance(value, str):
        raise TypeError(f"{value!r} is one string; give a list of names, such as [{value!r}]")
    return TypeConverters.toListString(value)


def _function(value: Any) -> Any:
    if not callable(value):
        raise TypeError(f"{value!r} cannot be called")
    return value


def _listed(value: Any) -> Any:
    return list(value)


def _flag(value: Any) -> Any:
    return TypeConverters.toBoolean(value)


def _instance(kind: type, hint: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{type(value).__name__} is no {kind.__name__}; {hint}")
        return value

    return _optional(check)


def _validation(value: Any) -> Any:
    check_validation(value)
    return value


def _pool(value: Any) -> Any:
    if value not in ("thread", "process", "dummy"):
        raise ValueError(f"{value!r} is not {POOLS_HINT}")
    return value


def with_settings(*settings: Setting) -> Callable[[Kind], Kind]:
    """Decorates a class of parameters: adds a Param, and a setter and a getter that it lacks, for each setting.

    The constructor's signature lists the settings of the class and of those that it derives from.
    """

    def decorate(kind: Kind) -> Kind:
        for setting in settings:
            # Spark's parameters are documented attributes of the class, which copies for each instance.
            param: Any = Param(Params._dummy(), setting.name, setting.doc)
            setattr(kind, setting.name, param)
            for method in (_setter(setting), _getter(setting)):
                method.__qualname__ = f"{kind.__qualname__}.{method.__name__}"
                if method.__name__ not in vars(kind):
                    setattr(kind, method.__name__, method)
        known = {**getattr(kind, "SETTINGS", {}), **{each.name: each for each in settings}}
        kind.SETTINGS = known  # type: ignore[attr-defined]
        if "__init__" in vars(kind):
            kind.__init__.__signature__ = _signature(known)  # type: ignore[misc]
        return kind

    return decorate


def _signature(known: dict[str, Setting]) -> inspect.Signature:
    """That of a constructor whose keyword arguments are settings."""
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default) for each in known.values()
    ]
    return inspect.Signature([self, *given])


def _setter(setting: Setting) -> Any:
    def set_value(self: Any, value: Any) -> Any:
        return self.set_by_name(setting.name, value)

    set_value.__name__ = f"set{setting.accessor}"
    set_value.__doc__ = f"Sets {setting.doc}. Returns this object."
    return set_value


def _getter(setting: Setting) -> Any:
    def get_value(self: Any) -> Any:
        return self.getOrDefault(getattr(self, setting.name))

    get_value.__name__ = f"get{setting.accessor}"
    get_value.__doc__ = f"Returns {setting.doc}."
    return get_value


class Settings(Params):  # type: ignore[misc, unused-ignore]
    """Parameters whose values are checked when they are set."""

    SETTINGS: dict[str, Setting] = {}  # noqa: RUF012 -- each subclass has its own

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self._setDefault(**{name: setting.default for name, setting in self.SETTINGS.items()})
        self.setParams(**values)

    def set_by_name(self, name: str, value: Any) -> Any:
        """Checks and sets a parameter. Returns this object. Raises ValueError and TypeError with its name."""
        setting = self.SETTINGS.get(name)
        if setting is None:
            raise TypeError(f"{type(self).__name__} has no parameter {name!r}")
        if setting.check is not None and value is not None:
            try:
                value = setting.check(value)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from error
        self._paramMap[getattr(self, name)] = value
        return self

    def setParams(self, **values: Any) -> Any:  # noqa: N802 -- as Spark's estimators
        """Sets parameters by their names; None leaves a default. Returns this object."""
        for name, value in values.items():
            if name not in self.SETTINGS:
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}")
            if value is not None:
                self.set_by_name(name, value)
        return self

    def value(self, name: str) -> Any:
        """Returns the value of a parameter, or its default."""
        return self.getOrDefault(getattr(self, name))

    def copy(self, extra: Any = None) -> Any:
        """Returns a copy with other values: {parameter: value}. They are checked. Parameters of others are left out."""
        copied = super().copy()
        # CrossValidator passes the map of an estimator also to its model, and a Pipeline passes one to all stages.
        own = {param: value for param, value in (extra or {}).items() if param in self.params}
        for param, value in own.items():
            copied.set_by_name(param.name, value)
        return copied


@with_settings(
    Setting("num_proc", "NumProc", "the number of processes", at_least(1)),
    Setting(
        "backend",
        "Backend",
        "the Backend that runs training; excludes num_proc",
        _instance(Backend, "give a ronde.spark.common.backend.Backend"),
    ),
    Setting(
        "store",
        "Store",
        "the Store of data sets, checkpoints and logs",
        _instance(Store, "give Store.create(path)"),
    ),
    Setting("data_module", "DataModule", "the class that gives processes their batches", _function),
    Setting("model", "Model", "the model to train"),
    Setting("optimizer", "Optimizer", "the optimizer, whose learning rate is multiplied by the number of processes"),
    Setting("loss", "Loss", "the loss, or one for each label"),
    Setting("loss_weights", "LossWeights", "the weights of the losses", _optional(TypeConverters.toListFloat)),
    Setting("metrics", "Metrics", "the metrics", _listed),
    Setting("sample_weight_col", "SampleWeightCol", "the column with weights of rows", TypeConverters.toString),
    Setting("gradient_compression", "GradientCompression", "the compressor of hvd.Compression for gradients"),
    Setting("compress_sparse_cols", "CompressSparseCols", "whether sparse vectors are written as such", _flag, False),
    Setting("feature_cols", "FeatureCols", "the columns that are the model's inputs", _names),
    Setting("label_cols", "LabelCols", "the columns that are labels of the model's outputs", _names),
    Setting("continuous_cols", "ContinuousCols", "accepted for Horovod's programs; has no effect", _names),
    Setting("categorical_cols", "CategoricalCols", "features that are numbers of categories", _names),
    Setting("validation", "Validation", "the share of rows, or the column, for validation", _validation),
    Setting("callbacks", "Callbacks", "the callbacks", _listed),
    Setting("random_seed", "RandomSeed", "the seed of processes, shuffling and the choice of rows", at_least(0)),
    Setting("batch_size", "BatchSize", "rows of a batch of one process", at_least(1), 32),
    Setting("val_batch_size", "ValBatchSize", "rows of a batch for validation", at_least(1)),
    Setting("epochs", "Epochs", "the number of epochs", at_least(0), 1),
    Setting("train_steps_per_epoch", "TrainStepsPerEpoch", "batches of an epoch", at_least(1)),
    Setting("validation_steps_per_epoch", "ValidationStepsPerEpoch", "batches of a validation", at_least(1)),
    Setting("verbose", "Verbose", "how much is printed: 0, 1 or 2", at_least(0), 1),
    Setting("shuffle_buffer_size", "ShuffleBufferSize", "rows that are mixed", at_least(0)),
    Setting("shuffle", "Shuffle", "whether training data is shuffled", _flag, True),
    Setting("partitions_per_process", "PartitionsPerProcess", "Parquet files for each process", at_least(1), 10),
    Setting("run_id", "RunId", "the name of the run in the store", TypeConverters.toString),
    Setting("transformation_fn", "TransformationFn", "a function of batches", _function),
    Setting("transformation_edit_fields", "TransformationEditFields", "columns that it changes or adds", _listed),
    Setting("transformation_removed_fields", "TransformationRemovedFields", "columns that are left out", _names),
    Setting("train_reader_num_workers", "TrainReaderNumWorker", "parallel reads for training", at_least(1)),
    Setting("val_reader_num_workers", "ValReaderNumWorker", "parallel reads for validation", at_least(1)),
    Setting("reader_pool_type", "ReaderPoolType", f"how they are parallel: {POOLS_HINT}", _pool, "thread"),
    Setting("label_shapes", "LabelShapes", "the shape of a row of each label", _listed),
    Setting("inmemory_cache_all", "InMemoryCacheAll", "whether rows are kept in memory", _flag, False),
    Setting("use_gpu", "UseGpu", "whether GPUs are used where all processes have one", _flag, True),
    Setting("mp_start_method", "MpStartMethod", "how processes of readers are started", TypeConverters.toString),
    Setting("debug_data_loader", "DebugDataLoader", "whether waits for batches are logged", _flag, False),
    Setting("train_async_data_loader_queue_size", "TrainAsyncDataLoaderQueueSize", "prefetched batches", at_least(0)),
    Setting(
        "val_async_data_loader_queue_size",
        "ValAsyncDataLoaderQueueSize",
        "prefetched batches in validation",
        at_least(0),
    ),
)
class EstimatorParams(Settings):
    """What all estimators have: see docs/SPARK_ESTIMATORS.md."""

    def setShufflingBufferSize(self, value: Any) -> Any:  # noqa: N802 -- Horovod's name
        """Sets `shuffle_buffer_size`, under an older name."""
        warnings.warn(
            "setShufflingBufferSize is deprecated: use setShuffleBufferSize", DeprecationWarning, stacklevel=2
        )
        return self.set_by_name("shuffle_buffer_size", value)

    def getShufflingBufferSize(self) -> Any:  # noqa: N802 -- Horovod's name
        """Returns `shuffle_buffer_size`, under an older name."""
        return self.value("shuffle_buffer_size")


@with_settings(
    Setting("history", "History", "the metrics of all epochs"),
    Setting("model", "Model", "the trained model"),
    Setting("feature_columns", "FeatureColumns", "the columns that are inputs", _names),
    Setting("label_columns", "LabelColumns", "the columns that were labels", _names),
    Setting("run_id", "RunId", "the name of the run in the store"),
    Setting("outputCols", "OutputCols", "the columns that `transform` adds", _names),
    Setting("categorical_cols", "CategoricalCols", "features that are numbers of categories", _names),
    Setting("_metadata", "Metadata", "the types and shapes of the columns in training"),
)
class ModelParams(Settings):
    """What all models of estimators have."""

    # Horovod has these names with a letter that is missing.
    def setLabelColoumns(self, value: Any) -> Any:  # noqa: N802
        """Sets `label_columns`, under Horovod's name."""
        return self.set_by_name("label_columns", value)

    def getLabelColoumns(self) -> Any:  # noqa: N802
        """Returns `label_columns`, under Horovod's name."""
        return self.value("label_columns")

    def output_columns(self) -> list[str]:
        """Returns the names of the columns that `transform` adds: one for each label."""
        given = self.value("outputCols")
        return list(given) if given else [f"{label}__output" for label in self.value("label_columns") or ()]

    def getOutputCols(self) -> list[str]:  # noqa: N802 -- Spark's name
        """Returns the names of the columns that `transform` adds, even where nobody has set them."""
        return self.output_columns()
