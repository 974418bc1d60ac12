"""The base classes of estimators and of the transformers that they return."""

from __future__ import annotations

import posixpath
import time
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow.dataset
from pyspark.ml import Estimator, Model

from ronde.spark.common import prepare
from ronde.spark.common.backend import Backend, SparkBackend
from ronde.spark.common.examples import example_of
from ronde.spark.common.params import EstimatorParams, ModelParams
from ronde.spark.common.pickling import dumps
from ronde.spark.common.schema import check_numbers, check_predictable, check_validation
from ronde.spark.common.task import Task, check_shapes
from ronde.spark.data.columns import arrays_of
from ronde.spark.data.reader import check_columns
from ronde.spark.data.rows import steps_of

if TYPE_CHECKING:
    from ronde.spark.common.progress import Progress
    from ronde.spark.common.store import Store


_PROGRAMS_OWN = ("callbacks", "transformation_fn", "data_module", "gradient_compression", "store")
"""Parameters that are pickled with the task, beside what frameworks pickle."""


class HorovodEstimator(Estimator, EstimatorParams):  # type: ignore[misc, unused-ignore]
    """An estimator of Spark ML that trains a model on the ranks of a job. Subclasses are for one framework each."""

    # Parameters of the estimator that training needs, in `Task.settings`.
    SENT: tuple[str, ...] = (
        "data_module",
        "batch_size",
        "val_batch_size",
        "shuffle",
        "shuffle_buffer_size",
        "transformation_fn",
        "transformation_edit_fields",
        "transformation_removed_fields",
        "inmemory_cache_all",
        "verbose",
        "random_seed",
        "train_reader_num_workers",
        "val_reader_num_workers",
        "reader_pool_type",
        "mp_start_method",
        "train_async_data_loader_queue_size",
        "val_async_data_loader_queue_size",
        "debug_data_loader",
        "loss_weights",
        "gradient_compression",
        "label_shapes",
        "use_gpu",
        "categorical_cols",
        "callbacks",
    )

    def fit(self, df: Any, params: Any = None) -> Any:
        """Writes a DataFrame to the store and trains on it. Returns the model as a transformer.

        df     -- with the feature, label, weight and validation columns; further ones are left out
        params -- {parameter: value}: values for this call; a list of these gives a list of models

        Raises, before training begins, ValueError for missing, null and ragged columns and for parameters that exclude
        each other, TypeError for a model that cannot be pickled, and OSError for a store that cannot be written. Raises
        RuntimeError with the first rank's traceback if training fails.
        """
        return super().fit(df, params)

    def _fit(self, df: Any) -> Any:
        backend, store = self._prepared(writes_data=True)
        if self.value("transformation_fn") is None:
            check_numbers(df, [*self.value("feature_cols"), *self.value("label_cols")])
        written = prepare.write(
            backend.num_processes(),
            store,
            df,
            self.value("label_cols"),
            self.value("feature_cols"),
            self.value("validation"),
            self.value("sample_weight_col"),
            self.value("compress_sparse_cols"),
            self.value("partitions_per_process"),
            self.value("verbose"),
            self.value("random_seed"),
        )
        return self._train(backend, store, written)

    def fit_on_parquet(self, params: Any = None, dataset_idx: int | None = None) -> Any:
        """Trains on Parquet data that are in the store. Returns the model as a transformer.

        params      -- {parameter: value}: values for this call
        dataset_idx -- the number of the data sets; default: those of the surrounding `prepare_data`, those at
                       `train_path` and `val_path` without a number, or those with the highest number

        Raises what `fit` does, and ValueError where there is no data set.
        """
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        backend, store = self._prepared(writes_data=False)
        index = self._data_index(store) if dataset_idx is None else dataset_idx
        train_rows = prepare.rows_of(store, store.get_train_data_path(index))
        val_path = store.get_val_data_path(index)
        has_val = store.is_parquet_dataset(val_path)
        if self.value("validation") and not has_val:
            raise ValueError(f"validation is set, but there is no Parquet data set at {val_path}")
        val_rows = prepare.rows_of(store, val_path) if has_val else 0
        return self._train(backend, store, prepare.DataSet(index, train_rows, val_rows))

    @staticmethod
    def _data_index(store: Store) -> int | None:
        active = prepare.prepared_index(store)
        if active is not None:
            return active
        indices = store.train_data_indices()
        if store.is_parquet_dataset(store.get_train_data_path()) or not indices:
            return None
        for index in reversed(indices):
            # Spark writes it when a data set is complete.
            if store.exists(posixpath.join(store.get_train_data_path(index), "_SUCCESS")):
                return index
        raise ValueError(
            f"none of the data sets up to {store.get_train_data_path(indices[-1])} has Spark's file _SUCCESS, so "
            "whoever wrote them was interrupted; write them again, or give dataset_idx if they are complete"
        )

    def _prepared(self, writes_data: bool) -> tuple[Backend, Store]:
        """Checks parameters. Returns backend and store."""
        for name in ("model", "store", "feature_cols", "label_cols"):
            if not self.value(name):
                raise ValueError(f"{name} is not set; {type(self).__name__} needs it")
        if self.value("num_proc") is not None and self.value("backend") is not None:
            raise ValueError("At most one of num_proc and backend may be given: a backend has its number of processes")
        check_validation(self.value("validation"))
        weights, labels = self.value("loss_weights"), self.value("label_cols")
        if weights is not None and len(weights) != len(labels):
            raise ValueError(f"loss_weights has {len(weights)} values for {len(labels)} label_cols; give one for each")
        self._check()
        for name in _PROGRAMS_OWN:
            dumps(self.value(name), name)
        store = self.value("store")
        store.check_writable(writes_data)
        return self.value("backend") or SparkBackend(self.value("num_proc")), store

    def _check(self) -> None:
        """Checks the framework's parameters. Raises ValueError and TypeError."""

    def _train(self, backend: Backend, store: Store, data: prepare.DataSet) -> Any:
        run_id = self.value("run_id") or f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
        task = self._task(store, run_id, data, backend.num_processes())
        task.payload, before = self._payload(store, run_id)
        # An interrupted run is completed. A complete one, or one with another goal, trains so many epochs more.
        progress = before.continued(self.value("epochs"))
        task.first_epoch, task.begun_epoch, task.last_epoch = progress
        if self.value("verbose") > 0 and progress.done:
            print(f"run {run_id} continues after epoch {progress.done} of {task.last_epoch}", flush=True)
        results = backend.run(self._remote(), args=(task,), env=self._environment())
        return self._model(results[0], task, run_id)

    def _task(self, store: Store, run_id: str, data: prepare.DataSet, size: int) -> Task:
        remote = store.to_remote(run_id, data.number)
        sent = {name: self.value(name) for name in self.SENT if self.hasParam(name)}
        batch, val_batch = sent["batch_size"], sent["val_batch_size"] or sent["batch_size"]
        task = Task(
            remote=remote,
            has_val=data.val_rows > 0,
            features=self.value("feature_cols"),
            labels=self.value("label_cols"),
            weight=self.value("sample_weight_col"),
            metadata={},
            train_steps=self.value("train_steps_per_epoch") or steps_of(data.train_rows, size, batch),
            val_steps=0,
            first_epoch=0,
            last_epoch=0,
            settings=sent,
        )
        if task.has_val:
            task.val_steps = self.value("validation_steps_per_epoch") or steps_of(data.val_rows, size, val_batch)
        task.metadata = self._described(store, remote.train_data_path, task.columns())
        if task.has_val:
            self._described(store, remote.val_data_path, task.columns())
        # A transformation may change shapes.
        if self.value("transformation_fn") is None:
            check_shapes(task.metadata, task.features, self._input_shapes(len(task.features)))
            check_shapes(task.metadata, task.labels, self.value("label_shapes"))
        return task

    def _input_shapes(self, count: int) -> Any:
        """Returns the shape that a row of each feature is to have, where that is known."""
        del count
        return self.value("input_shapes")

    def _described(self, store: Store, path: str, columns: list[str]) -> dict[str, Any]:
        """Type and shape of each column, from the first row of a data set."""
        found = pyarrow.dataset.dataset(
            store.get_localized_path(path), filesystem=store.arrow_filesystem(), format="parquet"
        )
        check_columns(found.schema, columns, path)
        first = arrays_of(found.head(1, columns=columns))
        for name, array in first.items():
            if array.dtype == object and self.value("transformation_fn") is None:
                raise ValueError(
                    f"column {name!r} has the type {found.schema.field(name).type}, which is no input of a model; "
                    "encode it before, or give transformation_fn"
                )
        return {name: {"dtype": str(array.dtype), "shape": list(array.shape[1:])} for name, array in first.items()}

    def _environment(self) -> dict[str, str] | None:
        """Environment variables of the processes."""
        return None

    # What a framework defines.

    def _payload(self, store: Store, run_id: str) -> tuple[dict[str, Any], Progress]:
        """Returns what processes need, and how far the run is by its checkpoint."""
        raise NotImplementedError

    def _remote(self) -> Any:
        """Returns the function that trains on a rank."""
        raise NotImplementedError

    def _model(self, result: Any, task: Task, run_id: str) -> Any:
        """Returns the transformer for the result of rank 0."""
        raise NotImplementedError


class HorovodModel(Model, ModelParams):  # type: ignore[misc, unused-ignore]
    """A transformer of Spark ML that adds a trained model's predictions. Subclasses are for one framework each."""

    def transform(self, df: Any, params: Any = None) -> Any:
        """Returns a DataFrame with one further column for each label: `LABEL__output`, unless `setOutputCols` named it.

        df     -- with the feature columns. A null in one of them fails the job with the column's name
        params -- {parameter: value}: values for this call

        A column has doubles where the model returns one number for a row, else dense vectors. `transformation_fn` of
        the training is not called. Raises ValueError for missing feature columns, for those of strings or bytes, and if
        an output column is there already.
        """
        return super().transform(df, params)

    def _transform(self, df: Any) -> Any:
        from ronde.spark.common.prediction import predicted

        check_predictable(df, self.value("feature_columns"))
        return predicted(
            df,
            self.value("feature_columns"),
            self.output_columns(),
            self._predictor(),
            self._output_sizes(df),
        )

    def _predictor(self) -> Any:
        """Returns a picklable function that returns the prediction function: arrays by column to arrays."""
        raise NotImplementedError

    def _output_sizes(self, df: Any) -> list[int]:
        """Returns the number of values of each output for a row.

        df -- the DataFrame, whose first row is read for a column whose shape is not known
        """
        return sizes_of(self._predictor()()(self.example(df=df)), self.value("label_columns"))

    def _input_shapes(self) -> Any:
        """Returns the shape of a row of each feature, where that is known."""
        return self.value("input_shapes") if self.hasParam("input_shapes") else None

    def example(self, rows: int = 2, df: Any = None) -> dict[str, Any]:
        """Returns arrays of zeros with the types and shapes of the feature columns in training.

        rows -- how many rows each array has
        df   -- a DataFrame with the columns. A model that its constructor made without `_metadata` has their shapes
                from its `input_shapes`, else from the first row, and their type is float64 or that of this row

        Raises ValueError with the names of the columns whose shape is not known.
        """
        return example_of(self.value("feature_columns"), self.value("_metadata"), self._input_shapes(), df, rows)


def sizes_of(outputs: list[Any], labels: list[str]) -> list[int]:
    """Returns the number of values of each output for a row. Raises ValueError if there is not one for each label."""
    if len(outputs) != len(labels):
        raise ValueError(f"the model has {len(outputs)} outputs for {len(labels)} label columns; give one for each")
    return [int(output[0].size) for output in outputs]
