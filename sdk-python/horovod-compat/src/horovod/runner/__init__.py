"""`horovod.run`: a function on all ranks of a job. The command line is in `horovod.runner.launch`."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, Callable

import ronde
from horovod.runner import mpi
from horovod.runner.translation import is_elastic, translate
from ronde import command
from ronde.run import Call, LauncherError, environment, run_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | os.PathLike[str] | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on `num_proc` ranks, as `ronde.run` does. Returns their results by rank.

    `np`, `min_np` and `max_np` are deprecated names of `num_proc`, `min_num_proc` and `max_num_proc`. The processes are
    started by `ronde run`, or with `use_mpi` by Open MPI's mpirun with the options `mpi_args`. `disable_cache` has no
    effect, and a message says so. In both cases functions and results are transferred as by `ronde.run`.

    With `min_num_proc` or `host_discovery_script` the job is elastic: workers come and go while it runs, `slots` are
    those of hosts that the script prints without a number, and the results are those of the last membership's ranks.
    All hosts must see this program's temporary folder (TMPDIR), because a worker may arrive at any time.

    Raises ValueError for hosts together with a hostfile, `use_gloo` together with `use_mpi`, hosts that cannot be read
    or have too few slots, arguments of elastic jobs in another job or with `use_mpi`, and `use_mpi` without Open MPI;
    RuntimeError if a rank fails, with its traceback; in an elastic job, if too few remain.
    """
    num_proc = _renamed("np", np, "num_proc", num_proc)
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi are both given; give one of them")
    given = {
        "num_proc": num_proc,
        "min_num_proc": _renamed("min_np", min_np, "min_num_proc", min_num_proc),
        "max_num_proc": _renamed("max_np", max_np, "max_num_proc", max_num_proc),
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "hosts": hosts,
        "hostfile": hostfile,
        "host_discovery_script": host_discovery_script,
        "start_timeout": start_timeout,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "disable_cache": disable_cache or None,
        "output_filename": output_filename,
        "verbose": bool(verbose) or None,
        "use_gloo": use_gloo or None,
        "use_mpi": use_mpi or None,
        "mpi_args": mpi_args,
        "network_interface": None if network_interface is None else [network_interface],
        "network_interfaces": _comma_list(network_interfaces),
    }
    given = {name: value for name, value in given.items() if value is not None}
    return run_translated(func, args, kwargs, given, executable)


def run_translated(
    func: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    executable: str | os.PathLike[str] | None,
) -> list[Any]:
    """Calls a function on all ranks of the job that Horovod's flags, by name, describe."""
    given = dict(given)
    if is_elastic(given):
        return _run_elastically(Call(func, tuple(args), dict(kwargs or {})), given, executable)
    if given.get("use_mpi"):
        return _run_by_mpi(Call(func, tuple(args), dict(kwargs or {})), {"num_proc": 1, **given}, executable)
    print_notes(translate(given).notes)
    # These are arguments of `ronde.run`; the others are options of the launcher.
    own = ("num_proc", "hosts", "hostfile")
    rest = translate({name: value for name, value in given.items() if name not in own}).arguments
    try:
        return ronde.run(
            func,
            args,
            kwargs,
            given.get("num_proc", 1),
            given.get("hosts"),
            given.get("hostfile"),
            executable=executable,
            options=rest,
        )
    except RuntimeError as error:
        if not str(error).startswith("one or more processes exited with non-zero status"):
            raise
        raise RuntimeError(f"Horovod detected that {error}") from None


def _run_elastically(call: Call, given: dict[str, Any], executable: str | os.PathLike[str] | None) -> list[Any]:
    given["num_proc"] = max(given.get("num_proc", 1), given.get("min_num_proc", 1))
    translation = translate(given)
    print_notes(translation.notes)

    def words(report: str) -> list[str]:
        return [command.find(), "run", *translation.arguments, "--report", report, "--"]

    try:
        return run_by(words, call, None, executable)
    except LauncherError as error:
        raise RuntimeError(f"Horovod detected that {error}") from None


def _run_by_mpi(call: Call, given: Mapping[str, Any], executable: str | os.PathLike[str] | None) -> list[Any]:
    variables = environment()
    print_notes(mpi.launcher(given, variables).notes)
    try:
        return run_by(lambda report: mpi.launcher(given, variables, report).words, call, given["num_proc"], executable)
    except LauncherError as error:
        raise RuntimeError(f"mpirun failed with exit code {error.status}: {error.reason}") from None


def print_notes(notes: Iterable[str]) -> None:
    """Prints messages about flags that act differently here, or have no effect."""
    for note in notes:
        print(f"horovod.run: {note}", file=sys.stderr, flush=True)


def _renamed(old: str, old_value: int | None, new: str, new_value: Any) -> Any:
    if old_value is None:
        return new_value
    warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3)
    return old_value


def _comma_list(value: str | Sequence[str] | None) -> str | None:
    return value if value is None or isinstance(value, str) else ",".join(value)


def __getattr__(name: str) -> Any:
    # Imported lazily: `python -m horovod.runner.launch` executes that module again.
    if name == "_HorovodArgs":
        from horovod.runner.launch import HorovodArgs

        return HorovodArgs
    raise AttributeError(f"module {__name__} has no attribute {name}")
