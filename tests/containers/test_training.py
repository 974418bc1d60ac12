"""The compose file as a user runs it: it trains to the end, and its containers have the documented limits."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import struct
import subprocess
from collections.abc import Callable, Iterator

import pytest
from conftest import SIDECAR, leave_out
from engine import Engine
from project import PATIENCE_S, SIDECARS, WORKERS, Project, is_local

SIDECAR_BYTES_MAX = 100_000_000
TRAINING_S = 600
MakeProject = Callable[..., Project]


def test_the_sidecars_image_is_small_and_has_no_shell(images: dict[str, int], docker: Engine) -> None:
    """At most 100 MB, and nothing to call but the program."""
    assert images["sidecar"] <= SIDECAR_BYTES_MAX
    alone = ["run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL"]
    assert docker.run(*alone, SIDECAR).startswith("ronde ")
    assert docker.run(*alone, SIDECAR, "plugin", "inspect", "topk").startswith("topk@"), "the plugins that come with it"
    with pytest.raises(AssertionError, match=r"no such file|not found"):
        docker.run(*alone, "--entrypoint", "/bin/sh", SIDECAR, "-c", "true")


def test_four_workers_train_and_everything_ends(project: MakeProject) -> None:
    """`up` ends by itself with the demo's last line, twice: the second time with what the first has left."""
    one = project()
    for _ in range(2):
        output = one.compose("up", "--no-build", timeout_s=TRAINING_S)
        pattern = r"RESULT accuracy=0\.(\d+) digests_equal=true sealed_bytes=(\d+) seconds=\d+$"
        result = re.search(pattern, output, re.MULTILINE)
        assert result, output[-4000:]
        assert int(result[1][:2]) >= 96
        assert int(result[2]) > 1_000_000
        for service in [*SIDECARS, *WORKERS, "certs", "result"]:
            state = one.inspect(service)["State"]
            assert (state["Running"], state["ExitCode"], state["OOMKilled"]) == (False, 0, False), service


def test_the_result_of_a_run_is_its_exit_status(project: MakeProject) -> None:
    """`run result` starts everything and fails when the training does."""
    one = project(RONDE_EPOCHS="0")
    with pytest.raises(AssertionError, match="result: "):
        one.compose("run", "--rm", "result", timeout_s=TRAINING_S)


def test_workers_have_no_sockets_of_the_internet_and_traffic_nothing_of_the_tensors(
    project: MakeProject, tmp_path: pathlib.Path
) -> None:
    """The kernel's view of each container while it trains."""
    if not is_local():
        leave_out("docker", "looking into the namespaces of containers needs root")
    override = pathlib.Path(__file__).parent / "workers.yaml"
    one = project(override, RONDE_TEST_FOLDER=str(pathlib.Path(__file__).parent))
    one.start(*SIDECARS)
    capture = tmp_path / "bridge.pcap"
    with captured(one.bridge(), capture):
        one.start(*WORKERS)
        one.await_lines("worker-0", "^step 20 ")
        for worker in WORKERS:
            assert only_a_loopback(one, worker)
            for family in ["inet", "inet6", "link"]:
                listed = one.within(worker, "ss", "--no-header", "--all", "--numeric", "--family", family)
                assert listed.strip() == "", f"{worker} {family}: {listed}"
            assert one.within(worker, "ss", "--no-header", "--all", "--family", "unix").strip() != ""
        check_surroundings(one)
    check_capture(capture)


@contextlib.contextmanager
def captured(bridge: str, path: pathlib.Path) -> Iterator[None]:
    """Captures all packets on a bridge while the context lasts."""
    command = ["tcpdump", "-i", bridge, "-U", "-w", str(path), "-s", "0"]
    sniffer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert sniffer.stderr is not None
        assert "listening on" in sniffer.stderr.readline()
        yield
    finally:
        sniffer.terminate()
        sniffer.communicate(timeout=PATIENCE_S)


def only_a_loopback(one: Project, service: str) -> bool:
    """Whether a container has no interface to anywhere, and no route."""
    interfaces = json.loads(one.within(service, "ip", "-json", "link"))
    routes = one.within(service, "ip", "route", "show", "table", "main")
    return [interface["ifname"] for interface in interfaces] == ["lo"] and routes.strip() == ""


def check_surroundings(one: Project) -> None:
    """Users, privileges, mounts and limits of all containers."""
    for service in [*SIDECARS, *WORKERS]:
        known = one.inspect(service)
        status = pathlib.Path(f"/proc/{known['State']['Pid']}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        uid = "10001" if service in SIDECARS else "10002"
        assert fields["Uid"].split() == [uid] * 4
        assert fields["Gid"].split() == ["10002"] * 4
        assert {fields[name].strip("0") for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]} == {""}
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert known["HostConfig"]["ReadonlyRootfs"]
        assert known["HostConfig"]["Memory"] > 0
        index = service.rpartition("-")[2]
        mounts = {mount["Destination"]: mount.get("Name", "").rpartition("_")[2] for mount in known["Mounts"]}
        # The tests' own program, which replaces the training's.
        mounts.pop("/tests", None)
        shared = {"/run/ronde": f"sockets-{index}"}
        own = {"/certs/own": f"certs-{index}"} if service in SIDECARS else {"/report": "report"} if index == "0" else {}
        assert mounts == {**shared, **own}, service
    for index, sidecar in enumerate(SIDECARS):
        root = pathlib.Path(f"/proc/{one.inspect(sidecar)['State']['Pid']}/root")
        assert sorted(path.name for path in (root / "certs/own").iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
        assert all(not any(path.iterdir()) for path in (root / "certs").glob("sidecar-*"))
        link = json.loads(
            one.engine.run(
                "exec", one.container(sidecar), "/usr/bin/ronde", "status", "--socket", "/run/ronde", "--json"
            )
        )
        assert {path["key_exchange"] for path in link["paths"]} == {"X25519MLKEM768"}, index


# What endless.py has its workers send: each element is this number, as a float of four bytes.
MARK = struct.pack("<f", 1.2345678)


def check_capture(capture: pathlib.Path) -> None:
    """The captured packets contain no tensors, names or keys."""
    traffic = capture.read_bytes()
    assert len(traffic) > 1_000_000, "the capture is of a training"
    for secret in [MARK * 3, b"marked-tensor", b"PRIVATE KEY"]:
        assert secret not in traffic, secret
    sums = [struct.pack("<f", factor * 1.2345678) for factor in (2, 3, 4)]
    assert not any(value * 3 in traffic for value in sums)
