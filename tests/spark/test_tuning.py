"""Estimators inside of Spark ML's own: CrossValidator and Pipeline pass one map of parameters to all that they have."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from ronde.spark.common.backend import LocalBackend
from ronde.spark.common.store import LocalStore
from ronde.spark.torch import TorchEstimator


def estimator(store: Any = None) -> TorchEstimator:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return TorchEstimator(
        backend=LocalBackend(1),
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[1]],
        partitions_per_process=1,
        verbose=0,
    )


def test_a_cross_validator_tunes_epochs(spark: Any, tmp_path: pathlib.Path) -> None:
    given = estimator(LocalStore(str(tmp_path)))
    df = spark.createDataFrame([(index / 40, index / 20 + 1) for index in range(40)], ["x", "y"])
    tuned = CrossValidator(
        estimator=given,
        estimatorParamMaps=ParamGridBuilder().addGrid(given.epochs, [1, 8]).build(),
        evaluator=RegressionEvaluator(predictionCol="y__output", labelCol="y"),
        numFolds=2,
        seed=1,
    ).fit(df)
    errors = list(tuned.avgMetrics)
    assert errors[1] < errors[0], "more epochs are better"
    assert len(tuned.bestModel.getHistory()) == 8


def test_a_pipeline_copies_parameters_to_the_stages_that_have_them(spark: Any) -> None:
    del spark  # VectorAssembler needs a session
    given, other, assembler = estimator(), estimator(), VectorAssembler(inputCols=["a"], outputCol="x")
    copied = Pipeline(stages=[assembler, given, other]).copy({given.epochs: 3, assembler.outputCol: "z"})
    assert [stage.getEpochs() for stage in copied.getStages()[1:]] == [3, 1]
    assert copied.getStages()[0].getOutputCol() == "z"
    assert (given.getEpochs(), other.getEpochs()) == (1, 1)
