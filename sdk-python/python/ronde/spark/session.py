"""The program's session of Spark: classic, in whose process the driver is, or of Spark Connect."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ronde.spark.version import FIRST_WITH_TLS, number_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_MISSING = (
    "Could not find an active SparkContext, are you running in a PySpark session or notebook? Make one first: "
    "SparkSession.builder.getOrCreate()"
)


class Stage(NamedTuple):
    """Tasks of Spark.

    func       -- what each does, as for `mapInArrow`
    size       -- how many there are
    schema     -- the columns of their rows
    is_barrier -- whether all begin at once, and all end when one fails
    """

    func: Callable[..., Any]
    size: int
    schema: str
    is_barrier: bool


class Progress(NamedTuple):
    """How far the tasks of a run are.

    active -- how many run
    ended  -- how many have ended, in whatever way
    """

    active: int
    ended: int


class Session:
    """What a run needs of a session. Jobs are known by a name that no other job has."""

    def __init__(self) -> None:
        self._cancelled: set[str] = set()

    def release(self) -> str:
        """Returns the release of Spark, such as "4.3.0"."""
        raise NotImplementedError

    def conf(self, name: str, default: str = "") -> str:
        """Returns a setting."""
        raise NotImplementedError

    def default_size(self) -> int:
        """Returns the default number of processes: `spark.default.parallelism`, else the CPUs of the cluster."""
        raise NotImplementedError

    def slots(self) -> int | None:
        """Returns how many tasks the cluster can run at once now; None if that cannot be known."""
        raise NotImplementedError

    def start(self, job: str, description: str, stage: Stage, done: Callable[..., None]) -> None:
        """Begins a stage.

        done -- called in another thread with the rows and None, or with None and an exception

        That thread submits the stage to Spark, unless the job is cancelled before. Raises an exception if it
        cannot be started; `done` is not called then.
        """
        raise NotImplementedError

    def progress(self, job: str) -> Progress | None:
        """Returns how far the tasks of a job are; None if that cannot be known."""
        raise NotImplementedError

    def cancel(self, job: str) -> None:
        """Ends the tasks of a job, and keeps those that have not begun from beginning.

        Spark cancels only what it has. A stage that is being submitted during this call may run nevertheless, so call
        it again until the job has ended.
        """
        self._cancelled.add(job)
        self._cancel(job)

    def _cancel(self, job: str) -> None:
        raise NotImplementedError

    def _collect(
        self, session: Any, job: str, stage: Stage, done: Callable[..., None], mark: Callable[[], None]
    ) -> None:
        """Submits a stage and waits for its rows. `session` is Spark's; `mark` gives this thread the job's name."""
        try:
            mark()
            if job in self._cancelled:
                raise RuntimeError(f"job {job} was cancelled before its stage was submitted to Spark")
            tasks = session.range(0, stage.size, 1, stage.size)
            rows = tasks.mapInArrow(stage.func, stage.schema, barrier=stage.is_barrier).collect()
        except BaseException as error:
            done(None, error)
        else:
            done(rows, None)


class ClassicSession(Session):
    """A session whose driver is in this program's Java."""

    def __init__(self, session: Any) -> None:
        super().__init__()
        self._session = session
        self._context = session.sparkContext

    def release(self) -> str:
        """Returns the release of the context."""
        return str(self._context.version)

    def conf(self, name: str, default: str = "") -> str:
        """Returns a setting of the context, which no later call changes."""
        return str(self._context.getConf().get(name, default))

    def default_size(self) -> int:
        """Returns the context's default parallelism."""
        return int(self._context.defaultParallelism)

    def slots(self) -> int | None:
        """Returns how many tasks the executors can run at once now, if Spark's Java has a function for it."""
        from py4j.protocol import Py4JError

        context = self._context._jsc.sc()
        try:
            profile = context.resourceProfileManager().defaultResourceProfile()
            return int(context.maxNumConcurrentTasks(profile))
        except Py4JError:  # not part of Spark's interface: a vendor's may lack it
            return None

    def start(self, job: str, description: str, stage: Stage, done: Callable[..., None]) -> None:
        """Begins a stage."""
        from pyspark import InheritableThread

        def mark() -> None:
            self._context.setJobGroup(job, description, interruptOnCancel=True)

        InheritableThread(target=lambda: self._collect(self._session, job, stage, done, mark), daemon=True).start()

    def progress(self, job: str) -> Progress:
        """Returns how far the tasks of a job are."""
        tracker = self._context.statusTracker()
        active = ended = 0
        for each in tracker.getJobIdsForGroup(job):
            info = tracker.getJobInfo(each)
            for stage in [] if info is None else [tracker.getStageInfo(number) for number in info.stageIds]:
                if stage is not None:
                    active += stage.numActiveTasks
                    ended += stage.numCompletedTasks + stage.numFailedTasks
        return Progress(active, ended)

    def _cancel(self, job: str) -> None:
        """Cancels the jobs of the group."""
        self._context.cancelJobGroup(job)


class ConnectSession(Session):
    """A session of Spark Connect: the driver is elsewhere.

    Raises RuntimeError if this release of PySpark cannot follow the tasks of such a session.
    """

    def __init__(self, session: Any) -> None:
        if not hasattr(session, "registerProgressHandler"):
            raise RuntimeError(
                "ronde.spark.run over Spark Connect needs PySpark 4 or later, here and on the server, and this one is "
                "older; upgrade it, or run the program with a classic session (without spark.remote)"
            )
        super().__init__()
        self._session = session
        self._progress: dict[str, Progress] = {}

    def release(self) -> str:
        """Returns the release of the server."""
        return str(self._session.version)

    def conf(self, name: str, default: str = "") -> str:
        """Returns a setting of the server."""
        return str(self._session.conf.get(name, default))

    def default_size(self) -> int:
        """Returns the number of partitions that the server gives to a range, by a job."""
        from pyspark.sql.functions import spark_partition_id

        return int(self._session.range(1 << 20).select(spark_partition_id().alias("part")).distinct().count())

    def slots(self) -> int | None:
        """Returns None."""
        return None

    def start(self, job: str, description: str, stage: Stage, done: Callable[..., None]) -> None:
        """Begins a stage."""
        del description
        self._progress[job] = Progress(0, 0)

        collecting: list[int] = []

        def follow(stages: Sequence[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
            # PySpark calls it for all operations of the session, each in the thread that waits for it.
            if threading.get_ident() not in collecting:
                return
            ended = sum(stage.num_completed_tasks for stage in stages or ())
            self._progress[job] = Progress(inflight_tasks, ended)

        def mark() -> None:
            collecting.append(threading.get_ident())
            self._session.addTag(job)
            self._session.registerProgressHandler(follow)

        def collect() -> None:
            try:
                self._collect(self._session, job, stage, done, mark)
            finally:
                with contextlib.suppress(ValueError):  # it was not registered
                    self._session.removeProgressHandler(follow)

        threading.Thread(target=collect, daemon=True).start()

    def progress(self, job: str) -> Progress | None:
        """Returns what the server has reported last."""
        return self._progress.get(job)

    def _cancel(self, job: str) -> None:
        """Interrupts the operations with the job's tag."""
        self._session.interruptTag(job)


def active() -> Session:
    """Returns the active session. Raises RuntimeError, with Horovod's words, if there is none."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    found: Any = SparkSession.getActiveSession()
    # With a local server, this process has a context, too: that of the server.
    if found is not None and type(found).__module__.startswith("pyspark.sql.connect."):
        return ConnectSession(found)
    context = SparkContext._active_spark_context
    if context is not None:
        return ClassicSession(found or SparkSession(context))
    with contextlib.suppress(ImportError):  # what Spark Connect needs is not installed
        from pyspark.sql.connect.session import SparkSession as Remote

        found = Remote.getActiveSession()
    if found is None:
        raise RuntimeError(_MISSING)
    return ConnectSession(found)


def unprotected(conf: Callable[[str], str], release: str) -> str:
    """Returns why Spark's connections between hosts must not carry a key; "" if they may.

    conf    -- returns a setting, "" if it is not set
    release -- of Spark, such as "4.3.0". One that has no number counts as without TLS
    """
    if conf("spark.authenticate") != "true":
        return "spark.authenticate is off, so whoever reaches Spark's ports can take part in what its tasks exchange"
    number = number_of(release)
    if conf("spark.ssl.rpc.enabled") == "true" and number is not None and number >= FIRST_WITH_TLS:
        if conf("spark.ssl.rpc.trustStore") or conf("spark.ssl.trustStore"):
            return ""
        return "spark.ssl.rpc.enabled is on without spark.ssl.rpc.trustStore, so Spark does not check certificates"
    if conf("spark.network.crypto.enabled") != "true":
        ignored = f"; spark.ssl.rpc.enabled has an effect from Spark 4.0 on, and this is {release}"
        return f"they are authenticated, but plaintext{ignored if conf('spark.ssl.rpc.enabled') == 'true' else ''}"
    if conf("spark.network.crypto.saslFallback") != "false":
        return (
            "spark.network.crypto.saslFallback is not off, so an attacker in the network can keep them from being "
            "encrypted"
        )
    return ""


def check(conf: Callable[[str], str]) -> None:
    """Raises ValueError if Spark's settings rule out barrier execution, in which all ranks begin together.

    conf -- returns a setting, "" if it is not set
    """
    if conf("spark.dynamicAllocation.enabled") == "true":
        raise ValueError(
            "spark.dynamicAllocation.enabled is on, and Spark does not run barrier stages then: ranks have to begin "
            "together. Start the session with spark.dynamicAllocation.enabled=false and a fixed number of executors, "
            "or use ronde.spark.run_elastic"
        )
