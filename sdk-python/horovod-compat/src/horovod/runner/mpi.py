"""`horovodrun --mpi`, which starts processes with Open MPI's mpirun.

Tensors still go through ronde's sidecars. On one host the process with local rank 0 starts the sidecar, as under
`mpirun` alone. On several hosts `ronde run --starter` starts a sidecar with a certificate on each, and then mpirun. If
RONDE_SOCKET is set, the user has started sidecars already.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import shutil
import socket
import subprocess
from typing import TYPE_CHECKING, Any

from horovod.runner import translation
from horovod.runner.common.util import hosts as host_lists
from horovod.runner.translation import Launcher
from ronde import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION_TIMEOUT_S = 30
_BINDING = ["--bind-to", "none", "--map-by", "slot"]
# Flags that have an effect only where mpirun starts the processes.
_OF_MPI = {"mpi_args", "binding_args", "mpi_threads_disable"}
# Flags of `ronde run` that have no effect on mpirun or on a sidecar that a worker starts.
_WITHOUT_MEANING = {name: note for name, note in translation.IGNORED.items() if name not in _OF_MPI}
_NO_NETWORK = "on one host ronde uses no network"
_RUNS_ALREADY = "RONDE_SOCKET is set, so the sidecars run already"
_INTERFACES = {"network_interfaces": "--network-interfaces", "network_interface": "--network-interface"}
# Variables of this host's shell, launcher or devices, which are not exported to other hosts.
_NOT_EXPORTED = re.compile(
    r"BASH_FUNC_.*|OLDPWD|_HOROVOD_SECRET_KEY|.*CUDA_VISIBLE_DEVICES|_|\W.*|RONDE_(TOKEN_FILE|WEB|WORLD)"
    r"|(RONDE|HOROVOD)_(LOCAL_|CROSS_)?(RANK|SIZE)"
)
# Flags that mpirun handles, even if `ronde run` has the same.
_OUTPUT = {"output_filename", "prefix_output_with_timestamp"}


def release(version_text: str) -> int:
    """Returns the release of Open MPI, from the output of `mpirun --version`. Raises ValueError for another MPI."""
    found = re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)", version_text)
    if found is None:
        output = version_text.strip().splitlines()[:1] or ["nothing"]
        raise ValueError(
            f"--mpi needs Open MPI, but `mpirun --version` says {output[0]!r}; put Open MPI's mpirun first on PATH, or "
            "leave --mpi out: `ronde run` starts the processes by itself"
        )
    return int(found[1])


def find() -> tuple[str, int]:
    """Returns the path of mpirun and the release of its Open MPI. Raises ValueError if no usable one exists."""
    path = shutil.which("mpirun")
    if path is None:
        raise ValueError(
            "--mpi: MPI support has not been built, as there is no mpirun on PATH; install Open MPI, or leave --mpi "
            "out: `ronde run` starts the processes by itself"
        )
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"--mpi: `{path} --version` printed nothing for {VERSION_TIMEOUT_S} s") from error
    return path, release(done.stdout)


def launcher(given: Mapping[str, Any], environment: Mapping[str, str], report: str | None = None) -> Launcher:
    """Returns the command that starts a job: mpirun, or on several hosts the `ronde run` that runs mpirun.

    report -- the path of the report that `ronde run` writes

    Raises as `horovod.runner.translation.translate` does, ValueError without Open MPI, and FileNotFoundError without
    `ronde`.
    """
    path, major = find()
    mpirun = translate(given, major, environment)
    if not needs_sidecars(given, environment):
        return Launcher([path, *mpirun.options], mpirun.notes)
    job = translation.translate({name: value for name, value in given.items() if name not in _OUTPUT})
    ronde = command.find()
    report_options = [] if report is None else ["--report", report]
    started = [path, *mpirun.options, "-x", "RONDE_WORLD", ronde, "worker", "--"]
    return Launcher([ronde, "run", *job.options, *report_options, "--starter", "--", *started], mpirun.notes)


def is_spread(given: Mapping[str, Any]) -> bool:
    """Returns whether some of the processes are on other hosts."""
    return not all(is_here(host.hostname) for host in hosts_of(given))


def needs_sidecars(given: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Returns whether `ronde run` must start sidecars: on several hosts, unless they run already."""
    return is_spread(given) and not environment.get("RONDE_SOCKET")


def translate(given: Mapping[str, Any], major: int, environment: Mapping[str, str]) -> translation.Translation:
    """Translates the given flags to the mpirun of Open MPI's release `major`.

    Raises as `horovod.runner.translation.translate` does.
    """
    translation.check(given)
    if not given.get("num_proc"):
        raise ValueError("the number of processes is missing: give -np N")
    found = translation.Translation(exports=translation.exports_of(given))
    if "start_timeout" in given:
        found.exports["RONDE_START_TIMEOUT"] = str(given["start_timeout"])
    found.options = ["--allow-run-as-root", *_output(given, major)]
    found.options += ["-np", str(given["num_proc"]), "-H", host_lists.in_a_list(hosts_of(given))]
    found.options += shlex.split(given["binding_args"]) if given.get("binding_args") else _BINDING
    found.options += _ssh(given)
    if is_spread(given):
        for name in sorted(name for name in environment if not _NOT_EXPORTED.fullmatch(name)):
            found.options += ["-x", name] if name not in found.exports else []
    for name, value in sorted(found.exports.items()):
        found.options += ["-x", f"{name}={value}"]
    found.options += shlex.split(given.get("mpi_args") or "")
    found.notes = translation.notes_of(given, {**_WITHOUT_MEANING, **unused_interfaces(given, environment)})
    return found


def unused_interfaces(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns the flags about interfaces, with the reason why they have no effect; none where sidecars are started."""
    if needs_sidecars(given, environment):
        return {}
    reason = _RUNS_ALREADY if is_spread(given) else _NO_NETWORK
    return {name: (flag, reason) for name, flag in _INTERFACES.items()}


def is_here(name: str) -> bool:
    """Returns whether this is this host's own name or address."""
    if name in {"localhost", socket.gethostname(), socket.getfqdn()}:
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def hosts_of(given: Mapping[str, Any]) -> list[host_lists.HostInfo]:
    """Returns the given hosts; this one by default."""
    if "hosts" in given:
        return host_lists.parse_hosts(given["hosts"])
    if "hostfile" in given:
        return host_lists.parse_host_file(given["hostfile"])
    return [host_lists.HostInfo("localhost", given["num_proc"])]


def _output(given: Mapping[str, Any], major: int) -> Sequence[str]:
    """Returns the options for output lines with their rank; since release 5 it is a single option."""
    has_time, folder = given.get("prefix_output_with_timestamp"), given.get("output_filename")
    if major < 5:
        options = ["--tag-output", *(["--timestamp-output"] if has_time else [])]
        return [*options, *(["--output-filename", folder] if folder else [])]
    parts = ["tag", *(["timestamp"] if has_time else []), *([f"dir={folder}"] if folder else [])]
    return ["--output", ",".join(parts)]


def _ssh(given: Mapping[str, Any]) -> Sequence[str]:
    words = [f"-p {given['ssh_port']}"] if "ssh_port" in given else []
    words += [f"-i {shlex.quote(given['ssh_identity_file'])}"] if "ssh_identity_file" in given else []
    return ["--mca", "plm_rsh_args", " ".join(words)] if words else []
