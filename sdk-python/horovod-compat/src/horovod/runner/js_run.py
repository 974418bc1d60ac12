"""`horovodrun` within a job of LSF, which starts processes with IBM's jsrun.

Tensors still go through ronde's sidecars. On one host rank 0 starts the sidecar; on several `ronde run --starter`
starts one with a certificate on each, and then jsrun. If RONDE_SOCKET is set, the user has started sidecars already.
"""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING, Any

from horovod.runner import mpi, translation
from horovod.runner.common.util import hosts as host_lists
from horovod.runner.translation import Launcher
from horovod.runner.util.lsf import LSFUtils
from ronde import command

if TYPE_CHECKING:
    from collections.abc import Mapping

# One resource set on each host, with all that the job has there: ranks fill hosts in their order.
_BINDING = ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--launch_distribution", "packed", "--bind", "none"]
# Flags that jsrun handles, even if `ronde run` has the same.
_OUTPUT = {"output_filename", "prefix_output_with_timestamp", "mpi_args", "binding_args", "use_jsrun"}
_WITHOUT_MEANING = {
    **{name: note for name, note in translation.IGNORED.items() if name not in _OUTPUT},
    "prefix_output_with_timestamp": ("--prefix-output-with-timestamp", "jsrun has no option for it"),
}


def is_installed() -> bool:
    """Returns whether jsrun is on PATH."""
    return shutil.which("jsrun") is not None


def is_default(given: Mapping[str, Any]) -> bool:
    """Returns whether jsrun starts a job whose flags name no other launcher: within LSF, where it is installed."""
    chosen = any(given.get(name) for name in ("use_gloo", "use_mpi", "use_jsrun"))
    return not chosen and LSFUtils.using_lsf() and is_installed()


def launcher(given: Mapping[str, Any], environment: Mapping[str, str], report: str | None = None) -> Launcher:
    """Returns the command that starts a job: jsrun, or on several hosts the `ronde run` that runs jsrun.

    given  -- the flags; without hosts, those of the LSF job
    report -- the path of the report that `ronde run` writes

    Raises as `horovod.runner.translation.translate` does, ValueError outside of LSF, without jsrun, and if the hosts
    have different numbers of slots.
    """
    if not LSFUtils.using_lsf():
        raise ValueError("--jsrun: horovodrun did not detect an LSF job; leave it out, and give hosts with -H")
    path = shutil.which("jsrun")
    if path is None:
        raise ValueError("--jsrun: there is no jsrun on PATH; leave it out: `ronde run` starts the processes by itself")
    given = {**given, **_hosts_of_lsf(given)}
    translation.check({name: value for name, value in given.items() if name != "use_jsrun"})
    words = [path, *_options(given, environment)]
    notes = translation.notes_of(given, {**_WITHOUT_MEANING, **mpi.unused_interfaces(given, environment)})
    if not mpi.needs_sidecars(given, environment):
        return Launcher(words, notes)
    job = translation.translate({name: value for name, value in given.items() if name not in _OUTPUT})
    report_options = [] if report is None else ["--report", report]
    ronde = command.find()
    started = [*words, "--env", "RONDE_WORLD", ronde, "worker", "--"]
    return Launcher([ronde, "run", *job.options, *report_options, "--starter", "--", *started], notes)


def _hosts_of_lsf(given: Mapping[str, Any]) -> dict[str, Any]:
    if "hosts" in given or "hostfile" in given:
        return {}
    np = given.get("num_proc")
    names = LSFUtils.get_compute_hosts()
    if not np or not names:
        return {}
    used = names[: min(np, len(names))]
    if np % len(used):
        raise ValueError(
            f"--jsrun: {np} processes cannot be spread evenly over the {len(used)} hosts of the LSF job; give hosts "
            "and their slots with -H, or another -np"
        )
    return {"hosts": ",".join(f"{name}:{np // len(used)}" for name in used)}


def _options(given: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    if not given.get("num_proc"):
        raise ValueError("the number of processes is missing: give -np N")
    hosts = mpi.hosts_of(given)
    np, filled, used = given["num_proc"], 0, []
    for host in hosts:
        if filled < np:
            used.append(min(host.slots, np - filled))
            filled += host.slots
    if filled < np or len(set(used)) != 1:
        raise ValueError(
            f"--jsrun: jsrun starts as many processes on each host, but -H gives {host_lists.in_a_list(hosts)} for "
            f"{np} processes; leave --jsrun out and give --gloo: `ronde run` starts any number on each"
        )
    options = ["--nrs", str(len(used)), "--rs_per_host", "1", "--tasks_per_rs", str(used[0])]
    options += shlex.split(given["binding_args"]) if given.get("binding_args") else _BINDING
    if given.get("output_filename"):
        options += ["--stdio_stdout", f"{given['output_filename']}.stdout"]
        options += ["--stdio_stderr", f"{given['output_filename']}.stderr"]
    exports = translation.exports_of(given)
    if "start_timeout" in given:
        exports["RONDE_START_TIMEOUT"] = str(given["start_timeout"])
    for name, value in sorted(exports.items()):
        options += ["--env", f"{name}={value}"]
    return options + (["--smpiargs", given["mpi_args"]] if given.get("mpi_args") else [])
