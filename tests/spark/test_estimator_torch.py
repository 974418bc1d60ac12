"""`TorchEstimator` on a session of Spark: trained weights are those of one process, and bad input is named."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import numpy
import pytest
import torch
from pyspark.ml.linalg import SparseVector, Vectors
from pyspark.sql import functions as sql
from ronde.spark.common.backend import Backend, LocalBackend, SparkBackend
from ronde.spark.common.prepare import clear_training_cache, prepare_data
from ronde.spark.common.store import LocalStore
from ronde.spark.common.util import get_simple_meta_from_parquet
from ronde.spark.data.reader import read_piece, row_groups
from ronde.spark.data.rows import batch_sizes, pieces_of, steps_of
from ronde.spark.torch import Compression, TorchEstimator, TorchModel, models

RANKS, BATCH, ROWS, RATE = 2, 8, 65, 0.05


@pytest.fixture(autouse=True)
def _fresh() -> None:
    clear_training_cache()
    torch.manual_seed(0)


def frame(spark: Any, rows: int = ROWS) -> Any:
    points = numpy.random.default_rng(1).random((rows, 2))
    listed = [(Vectors.dense(row), float(row @ [2, -1] + 1), bool(index % 5 == 0)) for index, row in enumerate(points)]
    return spark.createDataFrame(listed, ["features", "y", "held"])


def estimator(store: Any, **changed: Any) -> TorchEstimator:
    model = torch.nn.Linear(2, 1)
    settings = {
        "num_proc": RANKS,
        "store": store,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["features"],
        "label_cols": ["y"],
        "batch_size": BATCH,
        "epochs": 2,
        "partitions_per_process": 1,
        "verbose": 0,
        **changed,
    }
    return TorchEstimator(**settings)


def batches_of_ranks(store: Any) -> list[list[Any]]:
    """The batches that ranks get without shuffling: for each step, one of each rank."""
    path, filesystem = store.get_localized_path(store.get_train_data_path(0)), store.arrow_filesystem()
    groups = row_groups(path, filesystem)
    steps = steps_of(sum(group.rows for group in groups), RANKS, BATCH)
    ranks = []
    for rank in range(RANKS):
        pieces = [read_piece(filesystem, piece, ["features", "y"]) for piece in pieces_of(rank, RANKS, groups)]
        x = torch.tensor(numpy.concatenate([piece["features"] for piece in pieces]), dtype=torch.float32)
        y = torch.tensor(numpy.concatenate([piece["y"] for piece in pieces]), dtype=torch.float32)
        sizes = batch_sizes(len(x), steps, BATCH)
        ranks.append(list(zip(x.split(sizes), y.split(sizes))))
    return [list(step) for step in zip(*ranks)]


def one_process(model: torch.nn.Linear, steps: list[list[Any]], epochs: int) -> torch.nn.Linear:
    """Trains on the batches of all ranks at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * RANKS, momentum=0.9)
    for step in steps * epochs:
        optimizer.zero_grad()
        (sum(torch.nn.functional.mse_loss(model(x)[:, 0], y) for x, y in step) / RANKS).backward()
        optimizer.step()
    return model


def test_training_equals_that_of_one_process_and_continues(spark: Any, tmp_path: pathlib.Path) -> None:
    store, df = LocalStore(str(tmp_path / "store")), frame(spark)
    given = estimator(store, shuffle=False, run_id="run", metrics=[torch.nn.functional.l1_loss])
    start = {name: value.clone() for name, value in given.getModel().state_dict().items()}
    trained = given.fit(df)
    # The program's model is not changed.
    assert all(torch.equal(value, start[name]) for name, value in given.getModel().state_dict().items())
    steps = batches_of_ranks(store)
    assert sum(len(x) for step in steps for x, _ in step) == ROWS
    alone = torch.nn.Linear(2, 1)
    alone.load_state_dict(start)
    check_same(trained.getModel(), one_process(alone, steps, 2))
    assert [entry["epoch"] for entry in trained.getHistory()] == [0, 1]
    assert all(set(entry["train"]) == {"loss", "y_l1_loss"} for entry in trained.getHistory())
    check_transformer(trained, df, tmp_path)
    # The same DataFrame is not written again, and the optimizer continues with its momentum and its rate.
    further = given.fit(df, {given.epochs: 1})
    assert not store.exists(store.get_train_data_path(1))
    assert [entry["epoch"] for entry in further.getHistory()] == [2]
    alone.load_state_dict(start)
    check_same(further.getModel(), one_process(alone, steps, 3))
    assert further.getOptimizer().param_groups[0]["lr"] == RATE * RANKS


def check_same(model: Any, expected: Any) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-5, atol=1e-6)


def check_transformer(trained: TorchModel, df: Any, folder: pathlib.Path) -> None:
    """Predictions are the model's, also after saving and loading, and errors are named."""
    assert not trained.getModel().training
    rows = trained.transform(df).select("features", "y__output").collect()
    inputs = torch.tensor(numpy.stack([row[0].toArray() for row in rows]), dtype=torch.float32)
    expected = trained.getModel()(inputs)[:, 0].detach().numpy()
    numpy.testing.assert_allclose([row[1] for row in rows], expected, rtol=1e-5)
    trained.write().save(str(folder / "model"))
    loaded = TorchModel.load(str(folder / "model"))
    assert loaded.getHistory() == trained.getHistory()
    found = loaded.setOutputCols(["predicted"]).transform(df).select("predicted").collect()
    assert [row[0] for row in found] == [row[1] for row in rows]
    with pytest.raises(ValueError, match="column 'y' already"):
        trained.copy({trained.outputCols: ["y"]}).transform(df)
    with pytest.raises(ValueError, match="the feature column 'features' is not in the DataFrame"):
        trained.transform(df.drop("features"))


class TwoInputs(torch.nn.Module):
    """A category and a sparse vector in, a number and scores of classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = torch.nn.Embedding(3, 4), torch.nn.Linear(10, 4)
        self.number, self.scores = torch.nn.Linear(8, 1), torch.nn.Linear(8, 3)

    def forward(self, kind: Any, bag: Any) -> Any:
        joined = torch.cat([self.embedding(kind), self.hidden(bag).tanh()], dim=1)
        return self.number(joined), self.scores(joined)


def test_columns_outputs_weights_and_validation_on_prepared_data(spark: Any, tmp_path: pathlib.Path) -> None:
    listed = [
        (
            index % 3,
            SparseVector(10, {index % 10: 1.0 + index}),
            float(index),
            index % 3,
            1.0 + index % 2,
            index % 4 == 0,
        )
        for index in range(40)
    ]
    df = spark.createDataFrame(listed, ["kind", "bag", "number", "class", "weight", "held"])
    store, model = LocalStore(str(tmp_path)), TwoInputs()
    given = estimator(
        store,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=[torch.nn.functional.mse_loss, torch.nn.CrossEntropyLoss()],
        loss_weights=[0.25, 0.75],
        feature_cols=["kind", "bag"],
        categorical_cols=["kind"],
        label_cols=["number", "class"],
        sample_weight_col="weight",
        gradient_compression=Compression.fp16,
        epochs=1,
        val_batch_size=3,
        random_seed=4,
    )
    with prepare_data(RANKS, store, df, ["number", "class"], ["kind", "bag"], "held", "weight", True, 1) as index:
        trained = given.fit_on_parquet()
    rows = get_simple_meta_from_parquet(store, ["number", "class"], ["kind", "bag"], "weight", index)
    assert rows[:2] == (30, 10)
    assert rows[2]["bag"]["shape"] == [10]
    held = [row for row in listed if row[5]]
    kind, bag = torch.tensor([row[0] for row in held]), torch.tensor(numpy.stack([row[1].toArray() for row in held]))
    number, scores = trained.getModel()(kind, bag.float())
    weights = torch.tensor([row[4] for row in held])
    mse = (number[:, 0] - torch.tensor([row[2] for row in held])) ** 2
    entropy = torch.nn.functional.cross_entropy(scores, torch.tensor([row[3] for row in held]), reduction="none")
    expected = ((0.25 * mse + 0.75 * entropy) * weights).mean().item()
    assert trained.getHistory()[0]["validation"]["loss"] == pytest.approx(expected, rel=1e-4)
    found = trained.transform(df.limit(2)).select("number__output", "class__output").collect()
    assert isinstance(found[0][0], float)
    assert len(found[0][1]) == 3


def test_a_failure_in_training_names_the_rank(spark: Any, tmp_path: pathlib.Path) -> None:
    def fails(frame: Any) -> Any:
        raise ZeroDivisionError("in the transformation")

    with pytest.raises(RuntimeError, match=r"(?s)[Rr]ank [01].*in the transformation"):
        estimator(LocalStore(str(tmp_path)), transformation_fn=fails).fit(frame(spark))


class Unpicklable(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.lock = threading.Lock()


class Refusing(Backend):
    """Fails the test if training begins."""

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        raise AssertionError("training began")

    def num_processes(self) -> int:
        return RANKS


def refused(store: Any, **changed: Any) -> TorchEstimator:
    return estimator(store, **{"num_proc": None, "backend": Refusing(), **changed})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["features", "z"], r"weight column 'y' is not in the DataFrame, whose columns are features, z"),
        (["features", "y_null as y"], "column 'y' has 1 null values in 4 rows"),
        (["ragged as features", "y"], "column 'features' is ragged: its rows have from 1 to 2 elements"),
        (["ragged_vector as features", "y"], "column 'features' is ragged: its rows have from 2 to 3 elements"),
        (["null_vector as features", "y"], "column 'features' has 1 null values in 4 rows"),
        (["holed as features", "y"], "column 'features' has arrays with null elements in 1 of 4 rows"),
        (["text as features", "y"], "column 'features' has the type string"),
        (["when as features", "y"], "column 'features' has the type date"),
    ],
)
def test_a_bad_column_is_named_before_training(
    spark: Any, tmp_path: pathlib.Path, columns: list[str], message: str
) -> None:
    listed = [
        (Vectors.dense([1.0, 2.0]), 1.0, None, [1.0], Vectors.dense([1.0, 2.0]), [1.0, None], "a", None),
        *[
            (
                Vectors.dense([1.0, 2.0]),
                1.0,
                1.0,
                [1.0, 2.0],
                Vectors.dense([1.0] * 3),
                [1.0, 2.0],
                "b",
                Vectors.dense([1.0]),
            )
        ]
        * 3,
    ]
    names = ["features", "y", "y_null", "ragged", "ragged_vector", "holed", "text", "null_vector"]
    df = spark.createDataFrame(listed, names).withColumn("when", sql.current_date()).withColumn("z", sql.lit(1))
    df.createOrReplaceTempView("bad")
    store = LocalStore(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        refused(store).fit(spark.sql(f"select {', '.join(columns)} from bad"))
    assert not store.exists(store.get_train_data_path(0)), "what was written is removed"


def test_bad_input_is_refused_before_training(spark: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store, df = LocalStore(str(tmp_path / "store")), frame(spark, 4)
    with pytest.raises(OSError, match="the store cannot be written"):
        refused(LocalStore(str(tmp_path / "file" / "below"))).fit(df)
    model = Unpicklable()
    with pytest.raises(TypeError, match=r"the model \(Unpicklable\) cannot be pickled.*lock"):
        refused(store, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)).fit(df)
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        refused(store, model=torch.nn.Linear(2, 1)).fit(df)
    with pytest.raises(ValueError, match="there are no rows for training"):
        refused(store).fit(df.limit(0))
    with pytest.raises(ValueError, match="1 rows for 2 processes"):
        refused(store).fit(df.limit(1))
    for changed, message in [
        ({"num_proc": 2}, "At most one of num_proc and backend"),
        ({"model": None}, "model is not set"),
        ({"loss_weights": [1.0, 2.0]}, "loss_weights has 2 values for 1 label_cols"),
        ({"loss": [torch.nn.MSELoss()] * 2}, "2 losses for 1 label_cols"),
        ({"validation": "nope"}, "the validation column 'nope' is not in the DataFrame"),
        ({"validation": "features"}, "the validation column 'features' has the type"),
        ({"input_shapes": []}, "input_shapes has 0 shapes"),
        ({"train_minibatch_fn": print, "backward_passes_per_step": 2}, "train_minibatch_fn makes each step itself"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused(store, **changed).fit(df)
    with pytest.raises(ValueError, match=r"no Parquet data set at .*intermediate_train_data"):
        refused(LocalStore(str(tmp_path / "empty"))).fit_on_parquet()
    with pytest.raises(ValueError, match=r"no Parquet data set at .*intermediate_train_data.7"):
        refused(store).fit_on_parquet(dataset_idx=7)


def test_parameters_are_checked_when_they_are_set() -> None:
    for changed, kind, message in [
        ({"validation": 1.0}, ValueError, "validation is 1.0"),
        ({"batch_size": 0}, ValueError, "batch_size: 0 is not a whole number"),
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step"),
        ({"feature_cols": "features"}, TypeError, "give a list of names"),
        ({"store": "/path"}, TypeError, "store: str is no Store"),
        ({"reader_pool_type": "fiber"}, ValueError, "'thread', 'process' or 'dummy'"),
        ({"loss": 1, "loss_constructors": 2}, ValueError, "only one of loss and loss_constructors"),
    ]:
        with pytest.raises(kind, match=message):
            TorchEstimator(**changed)
    given = TorchEstimator(batch_size=4, epochs=3)
    assert given.setBatchSize(16).getBatchSize() == 16
    assert (given.getEpochs(), given.getShuffle(), given.getReaderPoolType(), given.getNumProc()) == (
        3,
        True,
        "thread",
        None,
    )
    assert given.copy({given.epochs: 5}).getEpochs() == 5
    assert given.getEpochs() == 3
    with pytest.warns(DeprecationWarning, match="setShuffleBufferSize"):
        assert given.setShufflingBufferSize(10).getShuffleBufferSize() == 10


def test_an_estimator_is_saved_and_loaded(spark: Any, tmp_path: pathlib.Path) -> None:
    given = estimator(LocalStore(str(tmp_path / "store")), metrics=[torch.nn.functional.l1_loss], validation=0.2)
    given.save(str(tmp_path / "estimator"))
    loaded = TorchEstimator.load(str(tmp_path / "estimator"))
    assert loaded.uid == given.uid
    assert (loaded.getBatchSize(), loaded.getValidation(), loaded.getLabelCols()) == (BATCH, 0.2, ["y"])
    assert loaded.getStore().get_train_data_path() == given.getStore().get_train_data_path()
    assert loaded.getOptimizer().param_groups[0]["params"][0] is loaded.getModel().weight
    assert loaded.getOptimizer().param_groups[0]["lr"] == RATE
    with pytest.raises(TypeError, match=r"has a ronde.spark.torch.estimator.TorchEstimator, not a .*TorchModel"):
        TorchModel.load(str(tmp_path / "estimator"))


def test_backends_have_their_number_of_processes(spark: Any) -> None:
    assert SparkBackend(3).num_processes() == 3
    assert SparkBackend().num_processes() == spark.sparkContext.defaultParallelism
    assert LocalBackend(2).num_processes() == 2


def test_a_model_of_torchscript_travels() -> None:
    given = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()))
    found = models.model_of(models.model_bytes(given))
    assert isinstance(found, torch.jit.ScriptModule)
    rows = torch.randn(5, 4)
    torch.testing.assert_close(found(rows), given(rows), rtol=0, atol=0)
