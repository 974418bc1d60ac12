"""`run`: a function on all ranks of a job whose processes are tasks of Spark."""

from __future__ import annotations

import dataclasses
import pickle
import secrets
import sys
import time
from typing import IO, TYPE_CHECKING, Any, Callable

from ronde.cluster.credentials import named
from ronde.run import Call, pickled
from ronde.spark import session as sessions
from ronde.spark.arguments import interfaces_of, start_timeout_of, variables_of
from ronde.spark.plan import RESULT, RunPlan
from ronde.spark.running import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ronde.spark.session import Session

# By which the clocks of hosts may differ.
CLOCKS_S = 60.0


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: IO[str] | None = None,
    stderr: IO[str] | None = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    job_secret_file: str | None = None,
    certs: str | None = None,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on `num_proc` ranks, each a process that a task of Spark starts.

        losses = ronde.spark.run(train, args=(0.1,), num_proc=4)

    fn            -- a function, also a lambda or one of a notebook: cloudpickle includes the objects that it uses.
                     Modules that it imports, and `ronde`, must be installed on all hosts
    num_proc      -- the number of ranks; default: `spark.default.parallelism`
    start_timeout -- seconds to wait until Spark has room for all ranks and starts them; default:
                     HOROVOD_SPARK_START_TIMEOUT, else 600
    use_gloo      -- unused: True or None
    env           -- variables for the ranks and their sidecars, without those of Spark's own processes. Spark stores
                     them with the stage, so put no secret here. A PYTHONPATH is searched before that of the tasks
    stdout, stderr -- where the ranks' output is written when they have ended, the last 16 MiB of each rank; default:
                     those of this program, with a local master only if they replace those of the process. It is in
                     the executors' logs at once, which are this program's standard error with a local master
    verbose       -- 0 for no message while the job waits for room
    nics          -- the networks that sidecars listen on, such as "eth0,10.0.0.0/8"; default: all
    prefix_output_with_timestamp -- whether lines of the ranks' output begin with the time
    executable    -- the Python of the ranks; default: that of Spark's tasks
    job_secret_file -- for several hosts: the path of a file with the same secret on all (`ronde certs secret`)
    certs         -- for several hosts: the path, on each, of the directory with its certificate (`ronde certs once`)

    Returns the results by rank. Ranks of one host are consecutive.

    Raises RuntimeError without a session of Spark; ValueError for arguments that contradict each other, and for
    `use_mpi` and `extra_mpi_args`; TimeoutError if Spark has no room for all ranks in time; RondeError if sidecars
    cannot be started or cannot authenticate each other; and WorkerError, a RuntimeError, with rank, host and the first
    traceback if a rank fails. The other ranks are ended then, and when this call is interrupted.
    """
    _check_starters(use_mpi, use_gloo, extra_mpi_args)
    session = sessions.active()
    size = num_proc if num_proc is not None else session.default_size()
    if size < 1:
        raise ValueError(f"num_proc is {size}; it is at least 1")
    sessions.check(session.conf)
    streams = _streams(stdout, stderr, session.conf("spark.master"))
    plan = dataclasses.replace(
        _plan(session, Call(fn, tuple(args), dict(kwargs or {})), size, start_timeout_of(start_timeout)),
        variables=variables_of(env),
        interfaces=interfaces_of(nics),
        credentials=named(certs, job_secret_file),
        executable=executable or "",
        timestamps=prefix_output_with_timestamp,
        keeps_output=tuple(streams),
    )
    found = rows_of(session, plan, getattr(fn, "__name__", "function"), verbose)
    for name, stream in streams.items():
        for rank in range(size):
            stream.write(found[rank, name].decode(errors="replace"))
    return [pickle.loads(found[rank, RESULT]) for rank in range(size)]


def _plan(session: Session, call: Call, size: int, timeout: float) -> RunPlan:
    """Returns the plan of a run, with defaults for what the caller may set."""
    reason = sessions.unprotected(session.conf, session.release())
    return RunPlan(
        run_id=secrets.token_hex(6),
        call=pickled(call),
        size=size,
        timeout=timeout,
        variables={},
        begins_until=time.time() + timeout + CLOCKS_S,
        is_private=not reason,
        unprotected=reason,
    )


def _streams(stdout: IO[str] | None, stderr: IO[str] | None, master: str) -> dict[str, IO[str]]:
    """Returns where the output of the ranks goes when they have ended.

    master -- of Spark. The tasks of a local one write to the standard error of this process, so the streams of this
              process get no copy. A stream that replaces `sys.stdout` or `sys.stderr`, as in a notebook, does
    """
    is_local = master.startswith("local") and not master.startswith("local-cluster")
    if stdout is None and not (is_local and sys.stdout is sys.__stdout__):
        stdout = sys.stdout
    if stderr is None and not (is_local and sys.stderr is sys.__stderr__):
        stderr = sys.stderr
    return {name: stream for name, stream in (("stdout", stdout), ("stderr", stderr)) if stream is not None}


def _check_starters(use_mpi: bool | None, use_gloo: bool | None, extra_mpi_args: str | None) -> None:
    if use_mpi or extra_mpi_args:
        raise ValueError(
            "use_mpi and extra_mpi_args have no meaning here: Spark's tasks start the ranks, without mpirun. Leave "
            "them out; programs that call MPI by mpi4py run by `mpirun` instead"
        )
    if use_gloo is False:
        raise ValueError("use_gloo=False leaves no way to start the ranks; leave it out")
