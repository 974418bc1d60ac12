"""`horovodrun --mpi`: processes are started by Open MPI's mpirun.

Tensors go through ronde's sidecars all the same. On one host the process with local rank 0 starts the sidecar, as under
a `mpirun` that the user types. On several hosts somebody has to have started a `ronde sidecar` on each.
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

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION_TIMEOUT_S = 30
_BINDING = ["--bind-to", "none", "--map-by", "slot"]
# What `ronde run` acts on, and mpirun or a sidecar that a worker starts does not.
_WITHOUT_MEANING = {
    **{
        name: told
        for name, told in translation.WITHOUT_MEANING.items()
        if name not in {"mpi_args", "binding_args", "mpi_threads_disable"}
    },
    "mpi_threads_disable": ("--mpi-threads-disable", "tensors do not go through MPI"),
    "network_interfaces": ("--network-interfaces", "with --mpi ronde uses no network, or sidecars that run already"),
    "network_interface": ("--network-interface", "with --mpi ronde uses no network, or sidecars that run already"),
}
# Not for other hosts: what means this host's shell, launcher or devices.
_NOT_EXPORTED = re.compile(r"BASH_FUNC_.*|OLDPWD|_HOROVOD_SECRET_KEY|.*CUDA_VISIBLE_DEVICES|_|RONDE_TOKEN_FILE|\W.*")


def release(version_text: str) -> int:
    """The release of Open MPI, from what `mpirun --version` says. Raises ValueError for another MPI."""
    found = re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)", version_text)
    if found is None:
        said = version_text.strip().splitlines()[:1] or ["nothing"]
        raise ValueError(
            f"--mpi needs Open MPI, but `mpirun --version` says {said[0]!r}; put Open MPI's mpirun first on PATH, or "
            "leave --mpi out: `ronde run` starts the processes by itself"
        )
    return int(found[1])


def find() -> tuple[str, int]:
    """The path of mpirun and the release of its Open MPI. Raises ValueError when there is none that can be used."""
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
        raise ValueError(f"--mpi: `{path} --version` has said nothing for {VERSION_TIMEOUT_S} s") from error
    return path, release(done.stdout)


def translate(given: Mapping[str, Any], major: int, environment: Mapping[str, str]) -> translation.Translation:
    """What the flags that were given mean to the mpirun of Open MPI's release `major`.

    Raises as `horovod.runner.translation.translate` does, and ValueError for several hosts without sidecars.
    """
    translation.check(given)
    if not given.get("num_proc"):
        raise ValueError("the number of processes is missing: give -np N")
    found = translation.Translation(exports=translation.exports_of(given))
    if "start_timeout" in given:
        found.exports["RONDE_START_TIMEOUT"] = str(given["start_timeout"])
    hosts = _hosts(given)
    is_spread = not all(is_here(host.hostname) for host in hosts)
    if is_spread and not environment.get("RONDE_SOCKET"):
        raise ValueError(
            f"--mpi with other hosts ({host_lists.in_a_list(hosts)}): mpirun starts processes, but nobody "
            "the sidecars that seal what goes between hosts. Leave --mpi out, and `ronde run` starts both; or start a "
            "`ronde sidecar` on each host and name its directory, the same on all, by RONDE_SOCKET"
        )
    found.options = ["--allow-run-as-root", *_output(given, major)]
    found.options += ["-np", str(given["num_proc"]), "-H", host_lists.in_a_list(hosts)]
    found.options += shlex.split(given["binding_args"]) if given.get("binding_args") else _BINDING
    found.options += _ssh(given)
    if is_spread:
        for name in sorted(name for name in environment if not _NOT_EXPORTED.fullmatch(name)):
            found.options += ["-x", name] if name not in found.exports else []
    for name, value in sorted(found.exports.items()):
        found.options += ["-x", f"{name}={value}"]
    found.options += shlex.split(given.get("mpi_args") or "")
    found.notes = translation.notes_of(given, _WITHOUT_MEANING)
    return found


def is_here(name: str) -> bool:
    """Whether this is a name or address of this host, as it calls itself."""
    if name in {"localhost", socket.gethostname(), socket.getfqdn()}:
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _hosts(given: Mapping[str, Any]) -> list[host_lists.HostInfo]:
    if "hosts" in given:
        return host_lists.parse_hosts(given["hosts"])
    if "hostfile" in given:
        return host_lists.parse_host_file(given["hostfile"])
    return [host_lists.HostInfo("localhost", given["num_proc"])]


def _output(given: Mapping[str, Any], major: int) -> Sequence[str]:
    """Lines with their rank; since release 5 with one option."""
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
