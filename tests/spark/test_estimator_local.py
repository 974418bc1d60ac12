"""Training on Parquet by processes of this host: no session of Spark takes part."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch
from ronde.spark.common.backend import LocalBackend
from ronde.spark.common.store import LocalStore
from ronde.spark.torch import TorchEstimator
from ronde.spark.torch.models import state_of

RANKS, BATCH, ROWS, RATE = 2, 5, 30, 0.05


def written(folder: pathlib.Path) -> tuple[LocalStore, torch.Tensor, torch.Tensor]:
    """A store with rows in `train` and `val`, and the rows for training."""
    points = numpy.random.default_rng(2).random((ROWS, 2)).astype("float32")
    table = pyarrow.table({"features": list(points), "y": points @ numpy.array([2, -1], "float32")})
    for part, rows in (("train", table), ("val", table.slice(0, 4))):
        (folder / part).mkdir()
        pyarrow.parquet.write_table(rows, folder / part / "rows.parquet", row_group_size=7)
    store = LocalStore(train_path=str(folder / "train"), val_path=str(folder / "val"))
    return store, torch.from_numpy(points), torch.from_numpy(table["y"].to_numpy())


def clipped(
    model: Any, optimizer: Any, transform: Any, loss_fn: Any, inputs: Any, labels: Any, weights: Any
) -> tuple[Any, Any]:
    """A step of a program: gradients are clipped to [-0.1, 0.1] after they are averaged."""
    optimizer.zero_grad()
    outputs, labels = transform(model(*inputs), labels)
    loss = loss_fn(outputs, labels, weights)
    loss.backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    return outputs, loss


def test_passes_are_summed_and_a_step_of_the_program_is_used(tmp_path: pathlib.Path) -> None:
    assert os.environ.get("RONDE_BIN"), "run the tests by `make spark-test`"
    store, x, y = written(tmp_path)
    shares = [(x[: ROWS // 2], y[: ROWS // 2]), (x[ROWS // 2 :], y[ROWS // 2 :])]
    for settings, passes, clip in [
        ({"backward_passes_per_step": 2}, 2, None),
        ({"train_minibatch_fn": clipped, "inmemory_cache_all": True, "reader_pool_type": "dummy"}, 1, 0.1),
    ]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        trained = TorchEstimator(
            backend=LocalBackend(RANKS),
            store=store,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            loss=torch.nn.MSELoss(),
            feature_cols=["features"],
            label_cols=["y"],
            batch_size=BATCH,
            epochs=2,
            shuffle=False,
            verbose=0,
            run_id=f"passes-{passes}",
            **settings,
        ).fit_on_parquet()
        expected = alone(model, shares, passes, clip)
        for name, value in trained.getModel().state_dict().items():
            torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-5, atol=1e-6)
        loss = float(torch.nn.functional.mse_loss(expected(x[:4])[:, 0], y[:4]))
        assert abs(trained.getHistory()[-1]["validation"]["loss"] - loss) < 1e-5
        assert state_of(store.read(store.get_checkpoint_path(f"passes-{passes}")))["epoch"] == 2


def alone(model: torch.nn.Linear, shares: list[Any], passes: int, clip: float | None) -> torch.nn.Linear:
    """Trains in this process on the batches of all ranks, from the given model, in three batches an epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * RANKS)
    batches = [list(zip(x.split(BATCH), y.split(BATCH))) for x, y in shares]
    steps = list(zip(*batches))
    for _ in range(2):
        for index, step in enumerate(steps):
            if index % passes == 0:
                optimizer.zero_grad()
            (sum(torch.nn.functional.mse_loss(model(x)[:, 0], y) for x, y in step) / RANKS).backward()
            if (index + 1) % passes == 0 or index + 1 == len(steps):
                if clip is not None:
                    torch.nn.utils.clip_grad_value_(model.parameters(), clip)
                optimizer.step()
    return model
