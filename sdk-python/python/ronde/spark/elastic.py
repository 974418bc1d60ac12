"""`run_elastic`: elastic jobs, whose hosts are tasks of Spark that come and go.

`ronde run` decides the membership, as everywhere. Each task is a host with one slot: it runs the launcher's agent,
whose child is the worker. When an executor is lost, the job continues without its tasks, and this program asks Spark
for others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, TYPE_CHECKING, Any, Callable

from ronde import command
from ronde.cluster.agent import gpus_of_host
from ronde.cluster.frames import SOCKET
from ronde.errors import RondeError
from ronde.private_folder import PrivateFolder
from ronde.processes import own_host
from ronde.run import CALL, Call, run_by
from ronde.spark import session as sessions
from ronde.spark.arguments import interfaces_of, start_timeout_of, variables_of
from ronde.spark.failures import cannot_begin
from ronde.spark.host_task import REFUSED, SCHEMA, TOKEN, HostPlan, HostTask, drawn_token, remove_token
from ronde.spark.hub import Hub
from ronde.spark.running import failure
from ronde.spark.session import Stage
from ronde.spark.supervisor import GPUS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ronde.spark.session import ClassicSession, Session

_HOSTS = "hosts"
# In workers: the folder of the call.
_FOLDER = "RONDE_SPARK_CALL"
_POLL_S = 1.0
_CERTS_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
# Tasks that fail one after the other before one has become a host.
_FAILURES_MAX = 3

_log = logging.getLogger("ronde.spark")


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on the ranks of an elastic job: executors may be lost, and new ones join.

    fn              -- as for `run`; it trains in a function that `hvd.elastic.run` decorates (docs/ELASTIC.md)
    num_proc        -- how many ranks the job needs to start; default: `spark.default.parallelism`, but not less than
                       `min_num_proc` and not more than `max_num_proc`
    min_num_proc    -- with how many it continues; default: `num_proc`
    max_num_proc    -- the most ranks; default: as many as the executors have room for
    start_timeout   -- seconds for hosts, sidecars and ranks to start; default: HOROVOD_SPARK_START_TIMEOUT, else 600
    elastic_timeout -- seconds to wait for enough ranks; default: 600
    reset_limit     -- how often the ranks may change; default: without limit
    env             -- variables for the ranks and their sidecars
    stdout, stderr  -- where the output of the ranks is written; default: those of this program
    verbose         -- 2 for the messages of sidecars
    nics, prefix_output_with_timestamp -- as for `run`
    min_np, max_np  -- Horovod's older names of min_num_proc and max_num_proc

    Tasks connect to this program, at `spark.driver.host`, over TLS. Tasks on other hosts than this one need encrypted
    connections of Spark (docs/SPARK.md).

    Returns the results of the ranks at the end, by rank. Raises RuntimeError without a session of Spark, or if too few
    ranks remain or all have failed, with the first traceback; ValueError for numbers that contradict each other and for
    a session of Spark Connect; RondeError with cause "settings" if a task runs on another host and Spark's connections
    are not encrypted.
    """
    session = sessions.active()
    if not isinstance(session, sessions.ClassicSession):
        raise ValueError(
            "run_elastic needs a session whose driver is this program, and this one is of Spark Connect, whose tasks "
            "cannot reach this program; use ronde.spark.run, or submit the program to the cluster"
        )
    least, size, most = _numbers(
        session, num_proc, _renamed("min_np", min_np, min_num_proc), _renamed("max_np", max_np, max_num_proc)
    )
    given = {
        "min-np": least,
        "num-proc": size,
        "max-np": most,
        "reset-limit": reset_limit,
        "elastic-timeout": None if elastic_timeout is None else max(1, int(elastic_timeout)),
        "start-timeout": max(1, int(start_timeout_of(start_timeout))),
        "network-interfaces": interfaces_of(nics) or None,
    }
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    words += ["--prefix-output-with-timestamp"] * prefix_output_with_timestamp + ["--verbose"] * (verbose > 1)
    variables = variables_of(env)
    words += [word for name in (*variables, _FOLDER) for word in ("-x", name)]
    streams = {name: stream for name, stream in (("stdout", stdout), ("stderr", stderr)) if stream is not None}
    job = _Job(session, words, size, most, getattr(fn, "__name__", "function"), variables)
    call = Call(_on_host, (fn, tuple(args), dict(kwargs or {})), {})
    with job:
        return run_by(job.words, call, None, ended=job.end, variables=variables, streams=streams, poll=job.check)


def _renamed(old_name: str, old: int | None, new: int | None) -> int | None:
    if old is not None and new is not None:
        raise ValueError(f"{old_name} and its newer name are both given; give the newer one")
    return new if old is None else old


def _numbers(session: Session, size: int | None, least: int | None, most: int | None) -> tuple[int, int, int | None]:
    """Returns the least, the first and the most ranks. Raises ValueError if they contradict each other."""
    if size is None:
        size = session.default_size()
        size = size if most is None else min(size, most)
        size = size if least is None else max(size, least)
    least = size if least is None else least
    if not 1 <= least <= size or (most is not None and most < size):
        raise ValueError(
            f"min_num_proc is {least}, num_proc {size} and max_num_proc {most}; they are at least 1, and none is less "
            "than the one before"
        )
    return least, size, most


def _on_host(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    os.environ[GPUS] = gpus_of_host(os.environ[_FOLDER])
    return fn(*args, **kwargs)


class _Job:
    """The tasks of an elastic job, and where they connect. A context manager.

    options    -- of the launcher
    size, most -- the first and the most ranks; None for as many as there is room for
    name       -- of the function
    variables  -- of the launcher's environment; gets one more
    """

    def __init__(
        self,
        session: ClassicSession,
        options: list[str],
        size: int,
        most: int | None,
        name: str,
        variables: dict[str, str],
    ) -> None:
        self._session, self._options, self._size, self._most, self._name = session, options, size, most, name
        self._variables = variables
        self._run_id = secrets.token_hex(6)
        self._job = f"ronde-{self._run_id}"
        self._folder: pathlib.Path | None = None
        self._hub: Hub | None = None
        self._plan: HostPlan | None = None
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._tasks = 0
        self._failures: list[BaseException] = []
        self._has_warned = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def words(self, report: str) -> list[str]:
        """Starts the tasks, and returns the launcher's arguments.

        report -- the path of the launcher's report, in the folder of the call
        """
        self._folder = pathlib.Path(report).parent
        with contextlib.closing(PrivateFolder(self._folder)) as folder:
            call = folder.read(CALL)
        identity = self._identity()
        conf = self._session.conf
        address = conf("spark.driver.host")
        self._hub = Hub(conf("spark.driver.bindAddress") or address, identity, self._folder / SOCKET, self._write)
        authority = (identity / "ca.pem").read_text()
        unprotected = sessions.unprotected(conf, self._session.release())
        self._plan = HostPlan(self._run_id, call, (address, self._hub.port), authority, own_host(), unprotected)
        if token := drawn_token(self._run_id):
            self._hub.add_token(token)
        self._write()
        threading.Thread(target=self._ask, daemon=True).start()
        shell = shlex.join([sys.executable, "-m", "ronde.cluster.remote_shell", str(self._folder)])
        hosts = shlex.join(["cat", str(self._folder / _HOSTS)])
        words = [command.find(), "run", "--remote-shell", shell, "--host-discovery-script", hosts, *self._options]
        self._variables[_FOLDER] = str(self._folder)
        return [*words, "--report", report, "--"]

    def _identity(self) -> pathlib.Path:
        """Makes a certificate for this end, and an authority whose key is kept nowhere. Returns their directory.

        Raises RondeError with the standard error of the command.
        """
        made = pathlib.Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ronde-spark-")))
        words = ["certs", "once", "--job", f"spark-{self._run_id}", "--sidecars", "0-0", str(made / "certs")]
        try:
            subprocess.run([command.find(), *words], check=True, capture_output=True, timeout=_CERTS_TIMEOUT_S)
        except subprocess.SubprocessError as error:
            text = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
            reason = f"cannot make the certificate of this run: {error}. Its standard error: {text}"
            raise RondeError(reason, "connect") from error
        return made / "certs" / "sidecar-0"

    def _write(self) -> None:
        """Writes the list of hosts, for the launcher."""
        assert self._folder is not None
        # Hosts come and go in several threads: under the lock, the last one that writes has seen all changes. The
        # folder is gone when the run has ended.
        with self._changed, contextlib.suppress(OSError), contextlib.closing(PrivateFolder(self._folder)) as folder:
            hub = self._hub
            names = {} if hub is None else hub.hosts()
            folder.replace(_HOSTS, "".join(f"{name}:1\n" for name in sorted(names)).encode())

    def _ask(self) -> None:
        """Keeps as many tasks asked of Spark as the job may have ranks."""
        while not self._ending.is_set():
            try:
                wanted = self._most if self._most is not None else max(self._session.slots() or 0, self._size)
                while self._tasks < wanted and not self._ending.is_set():
                    self._start()
            except Exception as error:  # Spark's driver may be about to end
                self._failed(error)
            self._ending.wait(_POLL_S)

    def _start(self) -> None:
        with self._changed:
            self._tasks += 1
        description = f"ronde.spark: a host of {self._name}"
        assert self._plan is not None
        stage = Stage(HostTask(self._plan), 1, SCHEMA, is_barrier=False)
        try:
            self._session.start(self._job, description, stage, self._ended)
        except BaseException:
            with self._changed:
                self._tasks -= 1
            raise

    def _ended(self, rows: Any, error: BaseException | None) -> None:
        """Takes the row of a task, or why it has none."""
        for row in rows or ():
            if row.kind == TOKEN and self._hub is not None:
                self._hub.add_token(bytes(row.content))
            elif row.kind == REFUSED:
                error = cannot_begin(bytes(row.content).decode())
        if error is not None:
            self._failed(error)
        with self._changed:
            self._tasks -= 1
            self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            if not self._ending.is_set():
                self._failures.append(error)

    def check(self) -> None:
        """Raises the error of the tasks if none can be a host, or if Spark's settings keep one from being one."""
        with self._changed:
            failures = list(self._failures)
            hosts = len(self._hub.hosts()) if self._hub is not None else 0
            has_hosts = hosts > 0
            if has_hosts:
                self._failures.clear()
        found = [each if isinstance(each, RondeError) else failure(each, 1) for each in failures]
        for error in found:
            # The next task on that host would be refused, too; a job that has its hosts goes on without it.
            if isinstance(error, RondeError) and error.cause == "settings" and hosts < self._size:
                raise error
        if has_hosts:
            # The launcher decides whether the hosts that there are suffice.
            if failures and not self._has_warned:
                self._has_warned = True
                _log.warning("a task beside the hosts of the job failed; the job continues: %s", failures[0])
        elif len(found) >= _FAILURES_MAX:
            raise found[0]

    def end(self) -> None:
        """Ends the tasks. Those that wait for a place are cancelled."""
        self._ending.set()
        if self._hub is not None:
            self._hub.close()
            deadline = time.monotonic() + _END_TIMEOUT_S
            # Tasks that have a place end by themselves, within this time; the others are cancelled.
            with self._changed:
                while self._tasks > 0 and time.monotonic() < deadline and self._session.progress(self._job).active:
                    self._changed.wait(_POLL_S / 4)
            self._session.cancel(self._job)
            self._hub = None
            remove_token(self._run_id)
        self._stack.close()
