"""A container engine for the tests: a running one, or one that is started for them.

An engine that is started has a socket and state of its own, and keeps what it has built in RONDE_CACHE, so that the
next run is short. It gets no bridge to the outside; builds use the machine's own network. It is stopped by its process
id.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator

START_S = 60
STOP_S = 60
SYSTEM_PATH = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]


class Engine:
    """An engine that answers."""

    def __init__(self, client: str, environment: dict[str, str], is_own: bool) -> None:
        self.client = client
        # For commands that search PATH for `docker`, and its socket.
        self.environment = environment
        # Whether it was started for the tests, where no registry of images may answer.
        self.is_own = is_own
        self.compose = compose_command(client, environment)

    def run(self, *words: str, timeout_s: float = 120) -> str:
        """The output of a client command on both streams; it must succeed."""
        return run([self.client, *words], self.environment, timeout_s)


@contextlib.contextmanager
def engine() -> Iterator[Engine | str]:
    """Returns an engine, or why there is none."""
    client = found_client()
    if client is None:
        yield "no docker client is installed (on Debian: apt-get install docker.io docker-compose debootstrap)"
        return
    environment = {**os.environ, "PATH": f"{pathlib.Path(client).parent}:{os.environ['PATH']}"}
    if answers(client, environment):
        yield Engine(client, environment, is_own=False)
        return
    dockerd = shutil.which("dockerd", path=":".join([os.environ["PATH"], *SYSTEM_PATH]))
    if dockerd is None or os.geteuid() != 0:
        yield "no container engine answers, and only root with `dockerd` can start one"
        return
    # The client of the same package: an older engine may not understand what a newer client asks for.
    packaged = "/usr/bin/docker"
    client = packaged if os.access(packaged, os.X_OK) else client
    environment["PATH"] = f"{pathlib.Path(client).parent}:{environment['PATH']}"
    with started(dockerd, client, environment) as own:
        yield own


def found_client() -> str | None:
    """The first `docker` that knows its version: other programs have that name, too."""
    for folder in dict.fromkeys([*os.environ["PATH"].split(":"), *SYSTEM_PATH]):
        path = os.path.join(folder, "docker")
        if not os.access(path, os.X_OK):
            continue
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
        if asked.returncode == 0 and asked.stdout.startswith("Docker version "):
            return path
    return None


def compose_command(client: str, environment: dict[str, str]) -> list[str] | None:
    """Compose v2 where the client has it, else docker-compose."""
    probe = subprocess.run([client, "compose", "version"], env=environment, capture_output=True, check=False)
    if probe.returncode == 0:
        return [client, "compose"]
    old = shutil.which("docker-compose", path=environment["PATH"])
    return [old] if old else None


def answers(client: str, environment: dict[str, str]) -> bool:
    """Whether an engine is running."""
    ask = [client, "version", "--format", "{{.Server.Version}}"]
    return subprocess.run(ask, env=environment, capture_output=True, timeout=60, check=False).returncode == 0


@contextlib.contextmanager
def started(dockerd: str, client: str, environment: dict[str, str]) -> Iterator[Engine | str]:
    """A separate engine while the context lasts."""
    cache = pathlib.Path(os.environ.get("RONDE_CACHE") or pathlib.Path.home() / ".cache" / "ronde") / "containers"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock, tempfile.TemporaryDirectory(prefix="ronde-engine-") as folder:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield f"another run of these tests uses {cache}"
            return
        environment = {**environment, "DOCKER_HOST": f"unix://{folder}/docker.sock"}
        places = ["--data-root", str(cache / "data"), "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        network = ["--bridge", "none", "--ip-forward=false", "--ip-masq=false"]
        command = [dockerd, *places, *network, "--host", environment["DOCKER_HOST"]]
        daemon_path = ":".join([*SYSTEM_PATH, environment["PATH"]])
        with open(cache / "dockerd.log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**environment, "PATH": daemon_path})
        try:
            deadline = time.monotonic() + START_S
            while not answers(client, environment):
                if process.poll() is not None or time.monotonic() > deadline:
                    log_tail = (cache / "dockerd.log").read_text(errors="replace")[-1500:]
                    yield f"dockerd did not start here; the end of {cache / 'dockerd.log'}:\n{log_tail}"
                    return
                time.sleep(0.2)
            yield Engine(client, environment, is_own=True)
        finally:
            stop(process)
            release(folder)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the engine and waits for it."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def release(folder: str) -> None:
    """Unmounts the engine's network namespace below a folder that is removed next."""
    mounts = [line.split(" ")[1] for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounts if place.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], check=False)


def run(command: list[str], environment: dict[str, str], timeout_s: float) -> str:
    """The output of a command on both streams; it must succeed."""
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
    return done.stdout
