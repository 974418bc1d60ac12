"""`LightningEstimator` on a session of Spark."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import lightning
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ronde.spark.common.prepare import clear_training_cache
from ronde.spark.common.store import LocalStore
from ronde.spark.data.module import ParquetDataModule
from ronde.spark.lightning import LightningEstimator, LightningModel, TorchEstimator
from ronde.spark.torch.models import state_of
from sklearn.datasets import load_iris

RANKS = 2


class Flowers(lightning.LightningModule):
    """Scores of three kinds for four measures."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def forward(self, measures: torch.Tensor) -> Any:
        return self.layers(measures)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        del index
        loss = torch.nn.functional.cross_entropy(self(batch["features"]), batch["kind"])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["kind"]))
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        del index
        right = (self(batch["features"]).argmax(1) == batch["kind"]).double().mean()
        self.log("val_accuracy", right, batch_size=len(batch["kind"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def frame(spark: Any) -> Any:
    """150 flowers of three kinds, whose measures are standardized."""
    measures, kinds = load_iris(return_X_y=True)
    measures = (measures - measures.mean(0)) / measures.std(0)
    listed = [(row.tolist(), int(kind), index % 5 == 0) for index, (row, kind) in enumerate(zip(measures, kinds))]
    return spark.createDataFrame(listed, ["features", "kind", "held"])


def estimator(store: Any, **changed: Any) -> LightningEstimator:
    torch.manual_seed(0)
    settings = {
        "num_proc": RANKS,
        "store": store,
        "model": Flowers(),
        "feature_cols": ["features"],
        "label_cols": ["kind"],
        "batch_size": 15,
        "partitions_per_process": 1,
        "random_seed": 3,
        "verbose": 0,
        **changed,
    }
    return LightningEstimator(**settings)


class InMemory(ParquetDataModule):
    """A program's data module, whose batches are the same in all epochs."""

    def train_data(self) -> Any:
        batches = list(super().train_data())
        assert len(batches) == self.steps_per_epoch_train
        return batches


def test_a_module_is_trained_saved_and_continued(spark: Any, tmp_path: pathlib.Path) -> None:
    clear_training_cache()
    store, df = LocalStore(str(tmp_path / "store")), frame(spark)
    given = estimator(
        store,
        validation="held",
        epochs=5,
        run_id="run",
        terminate_on_nan=True,
        trainer_args={"gradient_clip_val": 10.0},
        data_module=InMemory,
    )
    trained = given.fit(df)
    history = trained.getHistory()
    assert [entry["epoch"] for entry in history] == list(range(5))
    assert history[-1]["loss"] < history[0]["loss"] / 2
    held = df.filter("held").collect()
    scores = trained.getModel()(torch.tensor([row["features"] for row in held])).detach().numpy()
    right = numpy.mean(scores.argmax(1) == [row["kind"] for row in held])
    assert history[-1]["val_accuracy"] == pytest.approx(right, abs=1e-6)
    trained.save(str(tmp_path / "model"))
    loaded = LightningModel.load(str(tmp_path / "model"))
    found = loaded.transform(df.filter("held")).select("kind__output").collect()
    numpy.testing.assert_allclose([row[0].toArray() for row in found], scores, rtol=1e-4, atol=1e-5)
    assert store.exists(f"{store.get_logs_path('run')}/version_0/metrics.csv")
    further = given.fit(df, {given.epochs: 1})
    assert [entry["epoch"] for entry in further.getHistory()] == [5]
    assert further.getHistory()[0]["loss"] < history[-1]["loss"] * 1.2
    assert state_of(store.read(store.get_checkpoint_path("run")))["epoch"] == 6


def test_bad_input_is_refused_before_training(spark: Any, tmp_path: pathlib.Path) -> None:
    store, df = LocalStore(str(tmp_path)), frame(spark)
    plain, locked = torch.nn.Linear(4, 3), Flowers()
    locked.lock = threading.Lock()
    for changed, kind, message in [
        ({"loss": torch.nn.MSELoss()}, ValueError, "loss must not be given with a LightningModule"),
        ({"model": plain}, ValueError, "optimizer is not set"),
        ({"model": plain, "optimizer": torch.optim.SGD(plain.parameters(), 1.0)}, ValueError, "loss is not set"),
        ({"model": 3}, TypeError, "model is int"),
        ({"model": locked}, TypeError, r"the model \(Flowers\) cannot be pickled.*lock"),
        ({"train_minibatch_fn": print}, ValueError, "train_minibatch_fn is for TorchEstimator"),
        ({"num_gpus": 2}, ValueError, "a process has one GPU"),
        ({"trainer_args": {"limit_val_batches": 1}}, ValueError, "must not contain limit_val_batches; set train_steps"),
        ({"trainer_args": {"max_time": "0:1"}}, ValueError, "must not contain max_time; set epochs instead"),
        ({"trainer_args": {"max_steps": 9, "max_epochs": 2}}, ValueError, "must not contain max_epochs, max_steps;"),
    ]:
        with pytest.raises(kind, match=message):
            estimator(store, **changed).fit(df)
    assert TorchEstimator is LightningEstimator


class Rate(lightning.Callback):
    """Logs a value on rank 0 alone."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            pl_module.log("rate", 0.25, rank_zero_only=True)


def test_a_module_of_pytorch_is_trained_with_its_optimizer(spark: Any, tmp_path: pathlib.Path) -> None:
    clear_training_cache()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    trained = estimator(
        LocalStore(str(tmp_path)),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=torch.nn.functional.cross_entropy,
        epochs=2,
        callbacks=[ModelCheckpoint(monitor="loss", mode="min", save_top_k=-1), Rate()],
        run_id="run",
    ).fit(frame(spark))
    history = trained.getHistory()
    assert history[1]["loss"] < history[0]["loss"]
    assert [entry["rate"] for entry in history] == [0.25, 0.25]
    assert isinstance(trained.getModel(), torch.nn.Linear)
    # The callback's files are in the folder of the run.
    saved = sorted(path.name for path in (tmp_path / "runs" / "run").rglob("*.ckpt"))
    assert [name.partition("-")[0] for name in saved] == ["epoch=0", "epoch=1"]
