"""Runs a function on all ranks of a job, from a program that is not one of them.

cloudpickle writes the function and its arguments to a folder that only this user can read. `ronde run` starts the
workers, `python -m ronde.run_worker`. If all of them are on this host, they read the function from that folder and
write their results there. Otherwise the lowest rank that sees the folder broadcasts the function and gathers the
results over the job's encrypted and authenticated links. A folder of another user, or one that others can enter, is
not read. So a process unpickles only what this user's program or its own ranks have pickled. Nothing listens for
connections, and no other user can inject data.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
from typing import IO, TYPE_CHECKING, Any, Callable, NamedTuple

from ronde import command
from ronde.private_folder import PrivateFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Path = str | os.PathLike[str]

CALL, REPORT, RESULT, ERROR = "call", "report.json", "result", "error"
# The header before the pickled call: the length of the caller's `sys.path` as JSON.
HEADER = struct.Struct(">Q")
# After Ctrl-C the launcher ends its workers. It takes at most 5 s if they ignore SIGTERM.
GRACE_S = 15
_POLL_S = 1.0


def run(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    hostfile: Path | None = None,
    *,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: Path | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    output_filename: Path | None = None,
    verbose: bool = False,
    executable: Path | None = None,
    options: Sequence[str] = (),
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on each of `np` new processes, the ranks of a job. Returns their results by rank.

        def train(rate):
            hvd.init()
            ...
            return loss

        losses = ronde.run(train, args=(0.1,), np=4)

    func          -- a function, also a lambda or one of a notebook: cloudpickle includes the objects that it uses.
                     Modules that it imports must be installed on all hosts. The workers search the folders of this
                     process's `sys.path`, too.
    np            -- the number of ranks
    hosts         -- hosts and the number of ranks on each, such as "alpha:4,beta:4"; default: all ranks on this host.
                     They must include this host, or one that shares its temporary folder (TMPDIR).
    hostfile      -- a file with a line `alpha slots=4` for each host, instead of `hosts`
    start_timeout, ssh_port, ssh_identity_file, network_interfaces, output_filename, verbose -- as for `ronde run`
    executable    -- the Python of the workers; default: this one
    options       -- more options of `ronde run`, such as ["--sidecars", "2"]

    Workers inherit this process's environment. Output of the ranks appears as under `ronde run`. Each rank calls `init`
    or `ronde.connect` itself if it needs to. Sessions that `ronde.torch` leaves open are closed.

    Raises ImportError if cloudpickle is not installed; ValueError for `hosts` together with `hostfile`; errors of
    pickling, before anything starts; and RuntimeError if a rank fails, with that rank's traceback, after ending the
    other ranks.
    """
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile are both given; give one of them")
    launcher = _launcher(
        num_proc=np,
        hosts=hosts,
        hostfile=hostfile,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        network_interfaces=_comma_list(network_interfaces),
        output_filename=output_filename,
    )
    launcher += ["--verbose"] * verbose + list(options)

    def words(report: str) -> list[str]:
        return [*launcher, "--report", report, "--"]

    return run_by(words, Call(func, tuple(args), dict(kwargs or {})), np, executable)


class Call(NamedTuple):
    """The function that each rank calls, and its arguments."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class LauncherError(RuntimeError):
    """The launcher failed, in most cases because a rank failed.

    status -- its exit status
    reason -- why it failed, with the traceback of the first rank that failed
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"one or more processes exited with non-zero status: {reason}")
        self.status, self.reason = status, reason


def run_by(
    launcher: Callable[[str], list[str]],
    call: Call,
    size: int | None,
    executable: Path | None = None,
    ended: Callable[[], None] = lambda: None,
    variables: Mapping[str, str] | None = None,
    streams: Mapping[str, IO[str]] | None = None,
    poll: Callable[[], None] | None = None,
) -> list[Any]:
    """Makes a call on each of the ranks that a launcher starts. Returns their results by rank.

    launcher -- returns the launcher's arguments, up to the worker's command; its argument is the path of the report
                that `ronde run` writes
    size     -- the number of ranks; None in an elastic job, whose results are those of the ranks at its end
    ended    -- called when the launcher has ended, while the report's folder is still there
    variables -- environment variables of the launcher besides this process's; unlike its arguments, other users of this
                 host cannot read them
    streams  -- where the launcher's "stdout" and "stderr" are written; default: those of this process
    poll     -- called about once a second; an exception of it ends the job

    Raises LauncherError if the launcher fails, RuntimeError for a rank without a result, and errors of pickling.
    """
    content = pickled(call)
    with tempfile.TemporaryDirectory(prefix="ronde-call-") as name:
        path = pathlib.Path(name)
        with contextlib.closing(PrivateFolder(path)) as folder:
            folder.write(CALL, content)
            worker = [os.fspath(executable or sys.executable), "-m", "ronde.run_worker", name]
            try:
                words = [*launcher(str(path / REPORT)), *worker]
                status = _wait(words, {**environment(), **(variables or {})}, streams or {}, poll or (lambda: None))
            finally:
                ended()
            if status != 0:
                raise LauncherError(status, _failure(path, status))
            if size is None:
                return _elastic_results(folder, path)
            return [_result(folder, rank) for rank in range(size)]


def dumps(value: Any) -> bytes:
    """Pickles a value with cloudpickle. Raises ImportError if that is not installed."""
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError(
            "ronde.run needs cloudpickle to send functions to other processes; install it here and on all hosts: "
            "pip install cloudpickle"
        ) from error
    content: bytes = cloudpickle.dumps(value)
    return content


def environment() -> dict[str, str]:
    """Returns this process's variables, with this package's folder on PYTHONPATH for the workers."""
    package = str(pathlib.Path(__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package}


def pickled(call: Call) -> bytes:
    """Returns a pickled call after a header with the folders of its modules."""
    path = json.dumps([os.path.abspath(entry) for entry in sys.path]).encode()
    return HEADER.pack(len(path)) + path + dumps(tuple(call))


def _launcher(**given: Path | int | None) -> list[str]:
    """Returns the command that starts the job, with the given options."""
    launcher = [command.find(), "run"]
    for option, value in given.items():
        if value is not None:
            text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
            launcher += [f"--{option.replace('_', '-')}", text]
    return launcher


def _comma_list(value: str | Sequence[str] | None) -> str | None:
    return value if value is None or isinstance(value, str) else ",".join(value)


def _wait(
    arguments: list[str], environment: dict[str, str], streams: Mapping[str, IO[str]], poll: Callable[[], None]
) -> int:
    """Returns the exit status of the launcher. An exception here, such as Ctrl-C, ends the job; so does SIGKILL."""
    # The launcher gets SIGTERM when this thread ends.
    arguments = [command.find(), "exec-worker", "--parent", str(os.getpid()), "--asked", "--", *arguments]
    pipes: dict[str, Any] = dict.fromkeys(streams, subprocess.PIPE)
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, env=environment, **pipes) as launcher:
        copies = [
            threading.Thread(target=_copy, args=(getattr(launcher, name), stream), daemon=True)
            for name, stream in streams.items()
        ]
        for copy in copies:
            copy.start()
        try:
            while True:
                try:
                    status = launcher.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    poll()
                else:
                    for copy in copies:
                        copy.join(GRACE_S)
                    return status
        except BaseException:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(GRACE_S)
            launcher.kill()
            raise


def _copy(pipe: IO[bytes], stream: IO[str]) -> None:
    """Writes the lines of a pipe to a stream, until its end."""
    for line in pipe:
        with contextlib.suppress(ValueError, OSError):  # a stream that is closed must not stop the job
            stream.write(line.decode(errors="replace"))


def _failure(folder: pathlib.Path, status: int) -> str:
    """Returns the text of the caller's exception: the launcher's reason, and the first failing rank's traceback."""
    # Other ranks fail later, because the first one did.
    errors = sorted(folder.glob(f"{ERROR}.*"), key=lambda path: path.stat().st_mtime_ns)
    try:
        report = json.loads((folder / REPORT).read_text())
        reason, output = report["failure"] or "", "\n".join(report["starter_output"])
    except FileNotFoundError:
        reason = f"the launcher ended with exit code {status} before there was a job; its output is above"
        if errors:
            reason = f"rank {errors[0].name.rpartition('.')[2]} failed"
        output = ""
    if errors:
        return f"{reason.partition(chr(10))[0]}\n\n{errors[0].read_text(errors='replace')}"
    return f"{reason}\n\n{output}" if output else reason


def with_rank(rank: int | None, size: int | None, result: bytes) -> bytes:
    """Returns a pickled result of an elastic job after a header with what its worker knows of the job.

    rank, size -- of the worker's last session; None if it never connected
    """
    header = json.dumps([rank, size]).encode()
    return HEADER.pack(len(header)) + header + result


def _elastic_results(folder: PrivateFolder, path: pathlib.Path) -> list[Any]:
    """Returns the results of an elastic job's workers, by their last rank, else by worker.

    Raises RuntimeError that names the ranks without a result, or counts the results if ranks are unknown.
    """
    found, most = [], 0
    for file in path.glob(f"{RESULT}.*"):
        content, start = folder.read(file.name), HEADER.size
        end = start + HEADER.unpack_from(content)[0]
        (rank, size), worker = json.loads(content[start:end]), int(file.name.rpartition(".")[2])
        most = max(most, size or 0)
        found.append(((rank is None, rank, worker), content[end:]))
    if not found:
        raise RuntimeError("the job ended without a result: the function ended the processes of all workers")
    ranks = {rank for (_, rank, _), _ in found if rank is not None}
    # A worker that has closed its session does not see that the job loses hosts later.
    at_end = _ranks_at_the_end(path)
    missing = sorted(set(range(min(most, at_end or most))) - ranks)
    if missing:
        raise RuntimeError(
            f"the job ended without the results of the ranks {', '.join(map(str, missing))}: the function ended their "
            "processes, or their hosts were lost at the end"
        )
    # Workers that never connected, for example because their children did, do not know the size of the job.
    if any(is_unknown for (is_unknown, _, _), _ in found) and len(found) < at_end:
        raise RuntimeError(
            f"the job ended with the results of {len(found)} of {at_end} workers: the function ended the processes of "
            "the others, or their hosts were lost at the end"
        )
    return [pickle.loads(content) for _, content in sorted(found)]


def _ranks_at_the_end(folder: pathlib.Path) -> int:
    """Returns the number of ranks of the last membership, from the launcher's report; 0 if it is unknown."""
    try:
        return int(json.loads((folder / REPORT).read_text())["ranks"])
    except FileNotFoundError:
        return 0


def _result(folder: PrivateFolder, rank: int) -> Any:
    try:
        content = folder.read(f"{RESULT}.{rank}")
    except FileNotFoundError:
        raise RuntimeError(f"rank {rank} ended without a result: the function ended its process") from None
    return pickle.loads(content)
