"""The command `horovodrun`, which runs the equivalent `ronde run`, or with --mpi `mpirun`, within LSF `jsrun`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from horovod.runner import check_build, config_file, flags, js_run, mpi
from horovod.runner.translation import Launcher, interfaces, is_elastic, translate
from horovod.runner.util.lsf import LSFUtils
from ronde import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def run_commandline(arguments: Sequence[str] | None = None) -> None:
    """Starts the job of the command line, by executing `ronde run` or `mpirun` in place of this process.

    An invalid or unsupported command line ends with code 2 and a message.
    """
    parser = flags.parser()
    try:
        given, notes = parse(sys.argv[1:] if arguments is None else arguments, parser)
        if given.pop("check_build", False):
            print(check_build.table(is_verbose=given.get("verbose", False)), end="")
            return
        worker = command_of(given.pop("command", []))
        found = of_lsf(given)
        notes += notes_of_lsf(given, found)
        given.update(found)
        # An elastic job starts with --min-np processes without it.
        if "num_proc" not in given and "min_num_proc" not in given:
            parser.error("the number of processes is missing: give -np N, or --min-np N")
        if not worker:
            parser.error("the command of the processes is missing: give it after the flags")
        launcher = launcher_of(given)
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        parser.error(str(error))
    for note in notes + launcher.notes:
        print(f"horovodrun: {note}", file=sys.stderr, flush=True)
    os.execv(launcher.words[0], [*launcher.words, *worker])


def of_lsf(given: dict[str, Any]) -> dict[str, Any]:
    """Returns hosts and number of processes of the LSF job that this process is in, if the flags leave them out.

    One process for each slot of LSB_MCPU_HOSTS. Nothing where jsrun starts the processes, which finds hosts by itself.
    """
    is_jsrun = given.get("use_jsrun") or js_run.is_default(given)
    if is_elastic(given) or is_jsrun or not LSFUtils.using_lsf() or "hosts" in given or "hostfile" in given:
        return {}
    slots = LSFUtils.get_slots()
    if not slots:
        return {}
    hosts = ",".join(f"{host}:{count}" for host, count in slots)
    return {"hosts": hosts, "num_proc": given.get("num_proc", sum(count for _, count in slots))}


def notes_of_lsf(given: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Returns a message to the user if the slots of the LSF job decide how many processes start: in Horovod GPUs do.

    found -- what `of_lsf` has returned for these flags
    """
    if "num_proc" in given or "num_proc" not in found:
        return []
    return [
        f"one process is started for each of the {found['num_proc']} slots of the LSF job, not for each GPU; give "
        "-np N for another number"
    ]


def launcher_of(given: dict[str, Any]) -> Launcher:
    """Returns the launcher of the job. Raises what `translate` does; FileNotFoundError without `ronde`."""
    if not is_elastic(given) and given.get("use_mpi"):
        return mpi.launcher(given, os.environ)
    if not is_elastic(given) and (given.get("use_jsrun") or js_run.is_default(given)):
        return js_run.launcher(given, os.environ)
    translation = translate(given)
    return Launcher([command.find(), "run", *translation.arguments, "--"], translation.notes)


def parse(arguments: Sequence[str], parser: argparse.ArgumentParser | None = None) -> tuple[dict[str, Any], list[str]]:
    """Returns the given flags, by name, and messages to the user about the configuration file.

    Flags of the command line override those of the file, in either order. Raises ValueError for a number out of its
    range and for a file that cannot be read.
    """
    parser = parser or flags.parser()
    given = vars(parser.parse_args(list(arguments)))
    flags.check_ranges(parser, given)
    path = given.pop("config_file", None)
    if path is None:
        return given, []
    config = config_file.read(path)
    try:
        from_file = vars(_Raising.like(parser).parse_args(config.flags))
        flags.check_ranges(parser, from_file)
    except (argparse.ArgumentError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    notes = [f"{path}: {key} is not a setting of Horovod and has no effect" for key in config.unknown]
    kept = {name: value for name, value in from_file.items() if name != "command"}
    if any(given.get(name) for name in STARTERS):
        kept = {name: value for name, value in kept.items() if name not in STARTERS}
    return {**kept, **given}, notes


# Pairs of flags of which only one takes effect.
STARTERS = ("use_gloo", "use_mpi", "use_jsrun")


def command_of(words: Sequence[str]) -> list[str]:
    """Returns the worker's command, without a `--` that ends the flags."""
    return list(words[1:] if words[:1] == ["--"] else words)


class _Raising(argparse.ArgumentParser):
    """Horovod's command line for the flags of a file. It raises errors, so that the caller can add the file's name."""

    @classmethod
    def like(cls, parser: argparse.ArgumentParser) -> _Raising:
        return cls(prog=parser.prog, parents=[parser], add_help=False, argument_default=argparse.SUPPRESS)

    def error(self, message: str) -> Any:
        raise argparse.ArgumentError(None, message)


class HorovodArgs(argparse.Namespace):
    """The arguments of `_run`: every flag as an attribute, None until it is set.

    command  -- the worker's command with its arguments
    run_func -- instead of a command, a function without arguments
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**dict.fromkeys([*_flag_names(), "nics", "run_func", "executable"]), **given})


def _run(args: argparse.Namespace) -> list[Any] | None:
    """Runs a job and waits for its end. Returns the function's results, if the job runs a function.

    Flags that act differently here, or have no effect, are reported on standard error.

    Raises what `translate` does, and RuntimeError if a process fails.
    """
    from horovod.runner import print_notes, run_translated

    given = {name: value for name, value in vars(args).items() if value is not None}
    function, executable = given.pop("run_func", None), given.pop("executable", None)
    given = _by_flag(given)
    worker = command_of(given.pop("command", []))
    if function is not None:
        return run_translated(function, (), {}, given, executable)
    launcher = launcher_of(given)
    print_notes(launcher.notes)
    status = subprocess.call([*launcher.words, *worker])
    if status != 0 and given.get("use_mpi"):
        raise RuntimeError(f"mpirun failed with exit code {status}; its output is above")
    if status != 0:
        raise RuntimeError(
            "Horovod detected that one or more processes exited with non-zero status: "
            f"`ronde run` ended with {status}; its output is above"
        )
    return None


def _run_elastic(args: argparse.Namespace) -> list[Any] | None:
    """Runs an elastic job and waits for its end, as `_run` does.

    Raises what `_run` does, and ValueError if the arguments have neither `min_num_proc` nor `host_discovery_script`.
    """
    if not is_elastic(vars(args)):
        raise ValueError("an elastic job needs min_num_proc or host_discovery_script; `_run` runs other jobs")
    return _run(args)


def parse_args(arguments: Sequence[str] | None = None) -> HorovodArgs:
    """Parses a command line, by default that of this process, for `_run`. Interfaces are in the set `nics`.

    Raises ValueError for a number out of its range and for a file that cannot be read.
    """
    given, _ = parse(sys.argv[1:] if arguments is None else arguments)
    names, _ = interfaces(given)
    given = {name: value for name, value in given.items() if name not in _INTERFACES}
    return HorovodArgs(**given, **({"nics": set(names)} if names else {}))


def _flag_names() -> set[str]:
    return {action.dest for action in flags.parser()._actions if action.dest not in {"help", "version"}}


_INTERFACES = ("network_interfaces", "network_interface")


def _by_flag(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings by the names of their flags. Raises ValueError for an unknown one."""
    known, found = _flag_names(), {}
    for name, value in given.items():
        flag = "network_interfaces" if name == "nics" else name
        if flag not in known:
            raise ValueError(f"{name} is not a setting of Horovod's launcher")
        is_list = flag == "network_interfaces" and not isinstance(value, str)
        found[flag] = ",".join(sorted(value)) if is_list else value
    return found


_HorovodArgs = HorovodArgs

if __name__ == "__main__":
    run_commandline()
