"""Two hosts, each a node of Ray: what authenticates their sidecars, and what can be read on the network."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import environment, leave_out
from hosts_program import MARK
from test_executor import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT = 6399
TIMEOUT_S = 240
START_S = 120
_numbers = itertools.count()


class Hosts:
    """Two network namespaces with a link between them, and a cluster of Ray on them."""

    def __init__(self, names: tuple[str, str], addresses: tuple[str, str], folder: pathlib.Path) -> None:
        self.names, self.addresses, self.folder = names, addresses, folder
        self.certs, self.temporary = folder / "certs-here", folder / "tmp"
        temporary = str(self.temporary)
        self.variables = {**os.environ, "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": temporary}

    def on(self, host: int, command: list[str]) -> list[str]:
        """A command on one of the hosts, whose certificate it sees in `certs`, and whose temporary files there."""
        see = f"hostname {self.names[host]} && mount --bind {self.folder}/certs/sidecar-{1 - host} {self.certs}"
        see += f" && mount --bind {self.temporary_of(host)} {self.temporary}"
        script = f'{see} && exec "$@"'
        enter = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", script, "sh", *command]

    def temporary_of(self, host: int) -> pathlib.Path:
        """The folder that a host sees as the one for temporary files."""
        return self.folder / f"tmp-{host}"

    def program(self, case: str, *path: str) -> list[str]:
        """The command of the program on the first host."""
        program = [sys.executable, str(pathlib.Path(__file__).with_name("hosts_program.py"))]
        return self.on(0, [*program, f"{self.addresses[0]}:{PORT}", case, *path])

    def run(self, case: str, *path: str) -> Any:
        """Runs the program on the first host, and returns what it prints."""
        done = subprocess.run(
            self.program(case, *path),
            env=self.variables,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    if os.environ.get("RONDE_NO_NETNS") == "1" or os.geteuid() != 0:
        leave_out("netns", "hosts of their own are made by root only, and not with RONDE_NO_NETNS=1")
    environment()
    number = next(_numbers)
    names = (f"ronderay{os.getpid()}-{number}a", f"ronderay{os.getpid()}-{number}b")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="rh-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = Hosts(names, ("10.77.0.1", "10.77.0.2"), folder)
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v0", "netns", names[1])
        for name, address in zip(names, hosts.addresses):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "v0")
            ip("-n", name, "link", "set", "v0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        binary = os.environ["RONDE_BIN"]
        make = [binary, "certs", "once", "--job", "nightly", "--sidecars", "0-1", str(folder / "certs")]
        subprocess.run(make, check=True, capture_output=True)
        subprocess.run([binary, "certs", "secret", str(folder / "job-secret")], check=True, capture_output=True)
        for made in (hosts.certs, hosts.temporary, hosts.temporary_of(0), hosts.temporary_of(1)):
            made.mkdir(mode=0o700)
        yield hosts


@contextlib.contextmanager
def started(hosts: Hosts) -> Iterator[None]:
    """Starts Ray on both hosts."""
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "2"]
    start += ["--object-store-memory", str(100 * 2**20), "--disable-usage-stats"]
    head = ["--head", "--port", str(PORT), "--include-dashboard", "false", "--temp-dir", str(hosts.folder / "t")]
    options = [head, ["--address", f"{hosts.addresses[0]}:{PORT}"]]
    processes = []
    with open(hosts.folder / "ray.log", "w+") as log:
        try:
            for host in (0, 1):
                command = hosts.on(host, [*start, "--node-ip-address", hosts.addresses[host], *options[host]])
                processes.append(
                    subprocess.Popen(command, env=hosts.variables, stdout=log, stderr=log, start_new_session=True)
                )
                wait_for(log, host + 1)
            yield
        finally:
            # All processes of the namespaces, in which there is nothing else.
            for name in hosts.names:
                listed = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True)
                for pid in map(int, listed.stdout.split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            for process in processes:
                process.wait(20)


def wait_for(log: Any, count: int) -> None:
    """Waits until so many nodes have started."""
    deadline = time.monotonic() + START_S
    while True:
        log.seek(0)
        text = log.read()
        if text.count("Ray runtime started.") == count:
            return
        assert time.monotonic() < deadline, text
        time.sleep(0.2)


@pytest.fixture(scope="module")
def plaintext() -> Iterator[Hosts]:
    """Ray without TLS."""
    with two_hosts() as hosts, started(hosts):
        yield hosts


@pytest.fixture
def sealed() -> Iterator[Hosts]:
    """Ray with TLS."""
    with two_hosts() as hosts:
        hosts.variables.update(tls(hosts))
        with started(hosts):
            yield hosts


def tls(hosts: Hosts) -> dict[str, str]:
    """Makes an authority and a certificate for both hosts. Returns Ray's variables for TLS."""
    folder = hosts.folder
    names = ",".join(f"IP:{address}" for address in (*hosts.addresses, "127.0.0.1"))
    (folder / "names").write_text(f"subjectAltName={names},DNS:localhost\n")
    for command in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=authority"
        " -keyout ca.key -out ca.crt",
        "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=ray -keyout ray.key -out ray.csr",
        "x509 -req -in ray.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out ray.crt",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    files = {"SERVER_CERT": "ray.crt", "SERVER_KEY": "ray.key", "CA_CERT": "ca.crt"}
    return {"RAY_USE_TLS": "1", **{f"RAY_TLS_{name}": str(folder / file) for name, file in files.items()}}


def check(found: Any, hosts: Hosts) -> None:
    size = len(found)
    assert [each["rank"] for each in found] == list(range(size))
    total = struct.unpack("f", struct.pack("f", MARK))[0] * size
    assert all(each["same"] and abs(each["sum"] - total) < 0.1 for each in found), found
    assert {each["host"] for each in found} == set(hosts.names)
    assert all(each["secrets"] == [] for each in found)


def test_a_secret_file_authenticates_and_no_tensor_can_be_read(plaintext: Hosts) -> None:
    hosts = plaintext
    file = hosts.folder / "traffic"
    capture = ["ip", "netns", "exec", hosts.names[0], "tcpdump", "-i", "v0", "-U", "-w", str(file), "-s", "0"]
    with subprocess.Popen(capture, stderr=subprocess.PIPE) as tcpdump:
        assert tcpdump.stderr is not None
        assert b"listening on" in tcpdump.stderr.readline()
        check(hosts.run("job_secret_file", str(hosts.folder / "job-secret")), hosts)
        tcpdump.send_signal(signal.SIGINT)
        tcpdump.wait(20)
    content = file.read_bytes()
    secret = (hosts.folder / "job-secret").read_text().split()[-1]
    # The ranks have moved 400,000 bytes each, and Ray's plaintext is there.
    assert len(content) > 400_000
    assert b"BaseHorovodWorker" in content
    for value in (MARK, 2 * MARK):
        assert struct.pack("f", value) * 4 not in content
    assert secret.encode() not in content
    assert bytes.fromhex(secret) not in content


def test_certificates_number_the_nodes(plaintext: Hosts) -> None:
    """The first host has the certificate of sidecar 1."""
    check(plaintext.run("certs", str(plaintext.certs)), plaintext)


def test_nothing_begins_without_credentials(plaintext: Hosts) -> None:
    ways = ["RAY_USE_TLS=1", "docs/RAY.md"]
    for case, more in (("none", ["job_secret_file=", "certs="]), ("elastic", [])):
        found = plaintext.run(case)
        assert found["cause"] == "settings"
        assert all(way in found["error"] for way in (*ways, *more)), found


def test_over_rays_tls_ronde_makes_a_secret(sealed: Hosts) -> None:
    check(sealed.run("none"), sealed)
    left = [path.name for path in sealed.folder.rglob("job-secret*")]
    assert left == ["job-secret"], "the file that the test has made, and none of ronde"
    check(sealed.run("elastic"), sealed)
    for host in (0, 1):
        assert calls(sealed, host) == []


def test_a_killed_driver_leaves_nothing_on_other_hosts(sealed: Hosts) -> None:
    begun = sealed.folder / "begun"
    begun.mkdir()
    with subprocess.Popen(sealed.program("killed", str(begun)), env=sealed.variables) as driver:
        try:
            wait_until(lambda: len(list(begun.iterdir())) == 4 or driver.poll() is not None)
            assert driver.poll() is None
            assert len(calls(sealed, 1)) == 1
        finally:
            driver.kill()
    wait_until(lambda: not any(pathlib.Path("/proc", path.name).exists() for path in begun.iterdir()))
    wait_until(lambda: calls(sealed, 1) == [])


def calls(hosts: Hosts, host: int) -> list[pathlib.Path]:
    """The folders of calls that a host has."""
    return list(hosts.temporary_of(host).glob("ronde-call-*"))
