"""A task of a run: it begins the job with the other tasks, starts the process of its rank, and waits for its end."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ronde import handles
from ronde.cluster import planning, sidecars
from ronde.cluster.supervised import SupervisedRank
from ronde.errors import RondeError
from ronde.run import environment
from ronde.spark import plan as rows
from ronde.spark.arguments import OF_SPARK
from ronde.spark.beginning import Begun, begin, place_of
from ronde.spark.exchange import Exchange
from ronde.spark.failures import CannotBeginError, WorkerError
from ronde.spark.output import Output

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ronde.spark.plan import RunPlan

# A rank that has failed because of another one lets that one's failure end the stage: on a busy host, a task needs
# seconds to report it.
_GRACE_S = 10.0
# The most bytes of a row.
_PIECE_BYTES = 32 << 20
# In which a rank finds the GPUs that Spark has given to its task.
GPUS = "RONDE_SPARK_GPUS"


class RankTask:
    """What each task does, as a function for `mapInArrow`. Its rows have the columns of `plan.SCHEMA`.

    plan -- the run
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the rows of this task's rank, as record batches. Raises WorkerError if it fails."""
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        yield from supervised(self._plan, BarrierTaskContext.get())


def supervised(plan: RunPlan, context: Any) -> Iterator[Any]:
    """Runs the rank of a task, and yields its rows when all ranks have ended.

    context -- the task's `pyspark.BarrierTaskContext`

    Raises WorkerError if the rank fails, and CannotBeginError if the job cannot begin.
    """
    if time.time() > plan.begins_until:
        raise WorkerError(f"run {plan.run_id} was given up before Spark started its tasks")
    output = Output(plan)
    try:
        begun = _begun(plan, context)
        output.rank = begun.rank
        result = _result(plan, begun, output)
        # The sidecar of this host serves its other ranks, and those of other hosts, until all have ended.
        context.barrier()
    except BaseException:
        # This task's failure ends the stage, and with it the workers that would delay the sidecar's exit.
        sidecars.stop(waits=False)
        raise
    finally:
        sidecars.stop()
        handles.release()
    yield from _batches(begun.rank, rows.RESULT, result)
    for kind, content in output.kept():
        yield from _batches(begun.rank, kind, content)


def _begun(plan: RunPlan, context: Any) -> Begun:
    try:
        return begin(plan, Exchange(context, plan.timeout), context.partitionId(), place_of(context))
    except RondeError as error:
        raise CannotBeginError(error) from error


def _result(plan: RunPlan, begun: Begun, output: Output) -> bytes:
    """Returns the pickled result of the rank. Raises WorkerError."""
    place = begun.layout.places[begun.rank]
    rank = SupervisedRank(plan.executable or sys.executable, plan.call, _variables(plan, begun), output.emit)
    try:
        outcome = rank.wait()
    finally:
        rank.end()
    if outcome.failure is not None:
        if outcome.failure.is_of_others:
            time.sleep(_GRACE_S)
        raise WorkerError(f"{begun.described()} failed\n\n{outcome.failure.text}", begun.rank, place.host.name)
    assert outcome.result is not None
    return outcome.result


def _variables(plan: RunPlan, begun: Begun) -> dict[str, str]:
    """Returns the environment of the rank."""
    inherited = {name: value for name, value in environment().items() if not name.startswith(OF_SPARK)}
    for name in planning.WITHDRAWN:
        inherited.pop(name, None)
    # Also files that `spark.submit.pyFiles` or `addPyFile` have brought here. What the program gives comes first.
    paths = [plan.variables.get("PYTHONPATH", ""), inherited["PYTHONPATH"], *sys.path]
    own = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        GPUS: ",".join(begun.layout.places[begun.rank].gpus),
    }
    return {**inherited, **plan.variables, **own, **begun.variables}


def _batches(rank: int, kind: str, content: bytes) -> Iterator[Any]:
    import pyarrow

    pieces = range(0, max(len(content), 1), _PIECE_BYTES)
    for part, start in enumerate(pieces):
        columns = [
            pyarrow.array([rank], pyarrow.int32()),
            pyarrow.array([kind]),
            pyarrow.array([part], pyarrow.int32()),
            pyarrow.array([content[start : start + _PIECE_BYTES]], pyarrow.binary()),
        ]
        yield pyarrow.RecordBatch.from_arrays(columns, ["rank", "kind", "part", "content"])
