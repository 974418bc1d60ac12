"""Two hosts of a cluster of Spark: what authenticates their sidecars, and what can be read on the network."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import ROOT, environment, spark_home
from hosts_program import MARK

sys.path.append(str(ROOT / "sdk-python" / "tests"))
from two_hosts import two_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from two_hosts import TwoHosts

PORT = 7077
TIMEOUT_S = 1200
START_S = 480
PASSWORD = "between-hosts"


class Cluster:
    """A standalone cluster: its master and a worker on the first host, a worker on the second."""

    def __init__(self, hosts: TwoHosts, settings: Mapping[str, str]) -> None:
        self.hosts, self.settings = hosts, settings
        self.secret = hosts.folder / "job-secret"
        self._variables = {
            **os.environ,
            "TMPDIR": str(hosts.folder / "here"),
            "SPARK_HOME": str(spark_home(hosts.folder)),
        }
        for name in ("here", "own-0", "own-1"):
            (hosts.folder / name).mkdir(mode=0o700)
        self._processes: list[subprocess.Popen[bytes]] = []

    def _on(self, host: int, command: list[str]) -> list[str]:
        """A command on one of the hosts, with temporary files of its own."""
        see = f'mount --bind {self.hosts.folder}/own-{host} {self.hosts.folder}/here && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", see, "sh", "env", f"SPARK_LOCAL_IP={self.hosts.addresses[host]}"]
        return self.hosts.on(host, [*words, *command])

    def start(self) -> None:
        """Starts the master and the workers."""
        options = " ".join(f"-D{name}={value}" for name, value in self.settings.items())
        daemon = {**self._variables, "SPARK_DAEMON_JAVA_OPTS": options, "SPARK_DAEMON_MEMORY": "512m"}
        program = [str(pathlib.Path(self._variables["SPARK_HOME"], "bin", "spark-class")), "org.apache.spark.deploy."]
        address = self.hosts.addresses[0]
        master = ["--host", address, "--port", str(PORT), "--webui-port", "0"]
        self._start(0, [program[0], program[1] + "master.Master", *master], daemon, "Starting Spark master")
        for host, own in enumerate(self.hosts.addresses):
            worker = ["--host", own, "--cores", "1", "--memory", "1g", "--webui-port", "0", "--work-dir"]
            worker += [str(self.hosts.folder / f"work-{host}"), f"spark://{address}:{PORT}"]
            command = [program[0], program[1] + "worker.Worker", *worker]
            self._start(host, command, daemon, "Successfully registered with master")

    def _start(self, host: int, command: list[str], variables: Mapping[str, str], started: str) -> None:
        path = self.hosts.folder / f"log-{len(self._processes)}"
        with path.open("wb") as log:
            process = subprocess.Popen(
                self._on(host, command), env=variables, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(process)
        deadline = time.monotonic() + START_S
        while started not in path.read_text():
            assert process.poll() is None, path.read_text()
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends all processes of the namespaces, in which there is nothing else."""
        for name in self.hosts.names:
            listed = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(20)

    def run(self, case: str, **credentials: str) -> Any:
        """Runs the program on the first host, and returns what it prints."""
        address = self.hosts.addresses[0]
        settings = {
            **self.settings,
            "spark.driver.host": address,
            "spark.driver.bindAddress": address,
            "spark.ui.enabled": "false",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
        }
        program = [sys.executable, str(pathlib.Path(__file__).with_name("hosts_program.py"))]
        words = [f"spark://{address}:{PORT}", case, json.dumps(settings), json.dumps(credentials)]
        done = subprocess.run(
            self._on(0, [*program, *words]),
            env=self._variables,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    @contextlib.contextmanager
    def captured(self) -> Iterator[pathlib.Path]:
        """Captures what crosses the link between the hosts, into a file."""
        file = self.hosts.folder / "traffic"
        words = ["tcpdump", "-i", "v0", "-U", "-w", str(file), "-s", "0"]
        with subprocess.Popen(self.hosts.on(0, words), stderr=subprocess.PIPE) as tcpdump:
            assert tcpdump.stderr is not None
            line = tcpdump.stderr.readline()
            assert b"listening on" in line, line
            try:
                yield file
            finally:
                tcpdump.send_signal(signal.SIGINT)
                tcpdump.wait(20)


@contextlib.contextmanager
def started(settings: Mapping[str, str], has_tls: bool = False) -> Iterator[Cluster]:
    """A cluster with these settings, and with Spark's TLS."""
    environment()
    with two_hosts() as hosts:
        make = [os.environ["RONDE_BIN"], "certs", "secret", str(hosts.folder / "job-secret")]
        subprocess.run(make, check=True, capture_output=True)
        cluster = Cluster(hosts, {**settings, **(tls(hosts.folder) if has_tls else {})})
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def tls(folder: pathlib.Path) -> dict[str, str]:
    """Makes a key for all processes of Spark, and a trust store. Returns the settings."""
    key, trust = folder / "key.p12", folder / "trust.p12"
    make = "-genkeypair -keyalg EC -groupname secp256r1 -dname CN=spark -validity 2 -alias spark -keystore"
    for words in (f"{make} {key}", f"-exportcert -alias spark -file {folder}/spark.crt -keystore {key}"):
        keytool(words)
    keytool(f"-importcert -noprompt -alias spark -file {folder}/spark.crt -keystore {trust}")
    return {
        "spark.ssl.enabled": "true",
        "spark.ssl.rpc.enabled": "true",
        "spark.ssl.protocol": "TLSv1.3",
        "spark.ssl.keyStore": str(key),
        "spark.ssl.keyStorePassword": PASSWORD,
        "spark.ssl.keyPassword": PASSWORD,
        "spark.ssl.trustStore": str(trust),
        "spark.ssl.trustStorePassword": PASSWORD,
    }


def keytool(words: str) -> None:
    subprocess.run(["keytool", *words.split(), "-storepass", PASSWORD], check=True, capture_output=True)


@pytest.fixture(scope="module")
def plaintext() -> Iterator[Cluster]:
    with started({}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sealed() -> Iterator[Cluster]:
    """With Spark's authentication, its encryption of files, and its TLS."""
    settings = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": "f3a1c0ffee",
        "spark.io.encryption.enabled": "true",
    }
    with started(settings, has_tls=True) as cluster:
        yield cluster


def check(found: Any, cluster: Cluster) -> None:
    assert [each["rank"] for each in found] == [0, 1]
    total = struct.unpack("f", struct.pack("f", MARK))[0] * 2
    assert all(each["same"] and abs(each["sum"] - total) < 0.1 for each in found), found
    assert {each["host"] for each in found} == set(cluster.hosts.names)
    assert all(each["secrets"] == [] for each in found)


def check_traffic(content: bytes) -> None:
    # The ranks have moved 400,000 bytes each.
    assert len(content) > 400_000
    for value in (MARK, 2 * MARK):
        assert struct.pack("f", value) * 4 not in content


def test_nothing_begins_without_credentials(plaintext: Cluster) -> None:
    for case in ("run", "elastic"):
        found = plaintext.run(case)
        assert "ronde sends no key over Spark's connections: spark.authenticate is off" in found["error"], found
        assert "docs/SPARK.md" in found["error"]
        assert found["cause"] == "settings"


def test_a_secret_file_authenticates_and_no_tensor_can_be_read(plaintext: Cluster) -> None:
    with plaintext.captured() as file:
        check(plaintext.run("run", job_secret_file=str(plaintext.secret)), plaintext)
    content, secret = file.read_bytes(), plaintext.secret.read_text().split()[-1]
    check_traffic(content)
    # Spark's plaintext is there.
    assert b"RegisterExecutor" in content
    assert secret.encode() not in content
    assert bytes.fromhex(secret) not in content


def test_a_cluster_with_tls_and_authentication_trains(sealed: Cluster) -> None:
    with sealed.captured() as file:
        check(sealed.run("run"), sealed)
    content = file.read_bytes()
    check_traffic(content)
    assert b"RegisterExecutor" not in content
    left = [path.name for path in sealed.hosts.folder.rglob("job-secret*")]
    assert left == ["job-secret"], "the file that the test has made, and none of ronde"


def test_elastic_jobs_train_on_a_cluster_with_tls(sealed: Cluster) -> None:
    with sealed.captured() as file:
        check(sealed.run("elastic"), sealed)
    check_traffic(file.read_bytes())
    left = [path for host in range(2) for path in (sealed.hosts.folder / f"own-{host}").glob("ronde-*")]
    assert left == []
