"""Groups of torch.distributed that lose ranks and get others: `shrink_group` and `reconfigure`, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest import mock

import pytest
from conftest import PACKAGE, WORKERS, WORLD_TIMEOUT_S, ronde_binary
from two_hosts import TwoHosts, two_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

import ronde

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.distributed.ProcessGroup, "reconfigure"), reason="PyTorch 2.15 and later have these functions"
)

from ronde.torch.distributed.progress import Completer  # noqa: E402
from ronde.torch.distributed.survivors import Survivors  # noqa: E402


def run(script: str, arguments: Iterable[list[str]], ends: tuple[int, ...] = (), **variables: str) -> list[str]:
    """Runs processes until all but the last `ends` have ended, and returns their outputs. Ends the others.

    ends -- processes that the test ends itself
    """
    ronde_binary()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_RANK", "RONDE_JOB"))}
    environment = {**kept, "PYTHONPATH": str(PACKAGE), **variables}
    commands = [[sys.executable, str(WORKERS / script), *each] for each in arguments]
    processes = [
        subprocess.Popen(each, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for each in commands
    ]
    try:
        outputs = [
            "" if rank in ends else each.communicate(timeout=WORLD_TIMEOUT_S)[0] for rank, each in enumerate(processes)
        ]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    return outputs


def shrink(case: str, size: int, path: pathlib.Path, ends: tuple[int, ...] = ()) -> list[str]:
    return run("c10d_shrink.py", [[case, str(rank), str(size), str(path / "store")] for rank in range(size)], ends)


@pytest.mark.parametrize(
    ("case", "size", "dead"),
    [
        ("dead_ranks", 5, (0, 3)),
        pytest.param("dead_member", 4, (1,), marks=pytest.mark.heavy),
        pytest.param("left_out", 4, (), marks=pytest.mark.heavy),
        pytest.param("aborted", 4, (), marks=pytest.mark.heavy),
    ],
)
def test_groups_shrink(tmp_path: pathlib.Path, case: str, size: int, dead: tuple[int, ...]) -> None:
    """Each rank compares its weights with those that one process computes."""
    outputs = shrink(case, size, tmp_path)
    for rank, output in enumerate(outputs):
        assert (f"rank {rank} is done" in output) == (rank not in dead), "\n".join(outputs)


@pytest.mark.heavy
def test_a_survivor_that_does_not_come_is_named(tmp_path: pathlib.Path) -> None:
    outputs = shrink("missing", 3, tmp_path, ends=(2,))
    assert "rank 1 of 2 has not come within" in outputs[0], "\n".join(outputs)


@pytest.mark.heavy
def test_groups_on_two_hosts_shrink(tmp_path: pathlib.Path) -> None:
    """Sidecars without a launcher serve the first session; the ranks that remain start others, by the same secret."""
    secret, names = new_secret(tmp_path / "secret"), [0, 0, 1, 1, 1]
    with two_hosts() as hosts, contextlib.ExitStack() as stack:
        served = [started_sidecar(hosts, host, secret, names, stack) for host in (0, 1)]
        ranks = [shrinking_rank(hosts, rank, names, served, secret, tmp_path, stack) for rank in range(5)]
        outputs = [each.communicate(timeout=WORLD_TIMEOUT_S)[0] for each in ranks]
    for rank, output in enumerate(outputs):
        assert (f"rank {rank} is done" in output) == (rank not in {0, 3}), "\n".join(outputs)


def started_sidecar(
    hosts: TwoHosts, host: int, secret: str, placement: list[int], stack: contextlib.ExitStack
) -> dict[str, str]:
    """Starts the sidecar of a host; returns the variables by which workers find it."""
    peers = ",".join(f"{address}:7400" for address in hosts.addresses)
    options = ["--end-with-input", "--peers", peers, "--placement", ",".join(map(str, placement))]
    options += ["--job-secret-file", secret, "--job", "night", "--index", str(host)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    sidecar = subprocess.Popen(hosts.on(host, [ronde_binary(), "sidecar", *options]), **pipes)
    stack.callback(sidecar.wait)
    stack.callback(sidecar.kill)
    assert sidecar.stdout is not None
    serving = json.loads(sidecar.stdout.readline())
    assert serving["type"] == "serving", serving
    return {"RONDE_SOCKET": serving["socket_dir"], "RONDE_JOB": "night"}


def shrinking_rank(
    hosts: TwoHosts,
    rank: int,
    placement: list[int],
    served: list[dict[str, str]],
    secret: str,
    folder: pathlib.Path,
    stack: contextlib.ExitStack,
) -> subprocess.Popen[str]:
    host = placement[rank]
    own = {"RONDE_SIDECAR_JOB_SECRET_FILE": secret, "RONDE_HANDLE_ADDRESS": hosts.addresses[host]}
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), **own, **served[host]}
    command = [sys.executable, str(WORKERS / "c10d_shrink.py"), "dead_ranks", str(rank), "5", str(folder / "store")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(hosts.on(host, command), env=environment, **pipes)
    stack.callback(process.kill)
    return process


def reconfigure(case: str, folder: pathlib.Path, *phases: str, names: str) -> list[str]:
    return run("c10d_reconfigure.py", [[case, name, str(folder), *phases] for name in names])


@pytest.mark.parametrize(
    ("phases", "dead"),
    [
        pytest.param(["a,b,c", "c,a", "c,b,a,d"], "", marks=pytest.mark.heavy),  # one comes back, with another
        pytest.param(["a,b,c+", "b,a", "a,d,b"], "c", marks=pytest.mark.heavy),
        (["a+,b,c", "c,d,b"], "a"),  # the first has started the sidecar
    ],
)
def test_members_leave_die_and_come(tmp_path: pathlib.Path, phases: list[str], dead: str) -> None:
    """After each phase all members compare their weights with those that one process computes."""
    outputs = reconfigure("train", tmp_path, *phases, names="abcd" if "d" in "".join(phases) else "abc")
    for name, output in zip("abcd", outputs):
        assert ("is done" in output) == (name not in dead), "\n".join(outputs)


def test_errors_of_reconfigure_leave_the_group_usable(tmp_path: pathlib.Path) -> None:
    (output,) = reconfigure("errors", tmp_path, names="a")
    assert "is done" in output, output


def on_hosts(hosts: TwoHosts, case: str, folder: pathlib.Path, phases: list[str], secrets: list[str]) -> list[str]:
    """Runs a, c on the first host, and b, d on the second one."""
    ronde_binary()
    processes = []
    for number, name in enumerate("abcd"):
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
        environment["RONDE_SIDECAR_JOB_SECRET_FILE"] = secrets[number % 2]
        environment["RONDE_HANDLE_ADDRESS"] = hosts.addresses[number % 2]
        environment["RONDE_HANDLE_PORTS"] = "7400-7655"
        command = hosts.on(number % 2, [sys.executable, str(WORKERS / "c10d_reconfigure.py"), case, name, str(folder)])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen([*command, *phases], env=environment, **pipes))
    try:
        return [each.communicate(timeout=WORLD_TIMEOUT_S)[0] for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()


def new_secret(path: pathlib.Path) -> str:
    subprocess.run([ronde_binary(), "certs", "secret", str(path)], check=True, capture_output=True)
    return str(path)


@pytest.mark.heavy
def test_hosts_authenticate_each_other_by_a_secret(tmp_path: pathlib.Path) -> None:
    secrets = [new_secret(tmp_path / "secret")] * 2
    with two_hosts() as hosts:
        outputs = on_hosts(hosts, "train", tmp_path, ["a,b,c,d", "b,d,a", "b+,c", "c,a,d"], secrets)
    for name, output in zip("abcd", outputs):
        assert ("is done" in output) == (name != "b"), "\n".join(outputs)


@pytest.mark.heavy
def test_hosts_without_a_secret_do_not_begin(tmp_path: pathlib.Path) -> None:
    with two_hosts() as hosts:
        outputs = on_hosts(hosts, "without_credentials", tmp_path, ["a,b,c,d"], ["", ""])
    assert all("is done" in output for output in outputs), "\n".join(outputs)


@pytest.mark.heavy
def test_hosts_with_different_secrets_do_not_begin(tmp_path: pathlib.Path) -> None:
    secrets = [new_secret(tmp_path / name) for name in ("one", "other")]
    with two_hosts() as hosts:
        outputs = on_hosts(hosts, "refused", tmp_path, ["a,b,c,d"], secrets)
    assert all("is done" in output for output in outputs), "\n".join(outputs)
    assert any("not signed by an authority of this job" in output for output in outputs), "\n".join(outputs)


class Left:
    """Replaces the client of a session that another rank has shut down."""

    def _submit(self, *_: object, **__: object) -> None:
        raise ronde.ShutDownError("rank 1 has shut down", "closed")


def test_a_group_is_made_although_another_rank_has_left() -> None:
    survivors = Survivors(Left(), Completer(mock.Mock()))
    with pytest.raises(ronde.RondeError, match=r"cannot begin a session without the others.*rank 1 has shut down"):
        survivors.session([0], 1.0)
