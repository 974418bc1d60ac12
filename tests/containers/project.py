"""The compose file as a separate project, and views of its containers from the host."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import re
import subprocess
import time
import uuid
from collections.abc import Callable
from typing import Any

from engine import Engine, run

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COMPOSE = ROOT / "compose" / "compose.yaml"
SIDECARS = [f"sidecar-{index}" for index in range(4)]
WORKERS = [f"worker-{index}" for index in range(4)]
# For things that take seconds; busy machines are slow.
PATIENCE_S = 90


class Project:
    """Containers, networks and volumes of one call of compose."""

    def __init__(self, engine: Engine, *files: pathlib.Path, **settings: str) -> None:
        assert engine.compose is not None
        self.engine = engine
        self.name = f"ronde{uuid.uuid4().hex[:8]}"
        named = [word for file in (COMPOSE, *files) for word in ("-f", str(file))]
        self._compose = [*engine.compose, *named, "-p", self.name]
        self._environment = {**engine.environment, **settings}

    def compose(self, *words: str, timeout_s: float = 300) -> str:
        """The output of a compose command; it must succeed."""
        return run([*self._compose, *words], self._environment, timeout_s)

    def start(self, *services: str) -> None:
        """Starts services and their dependencies in the background."""
        self.compose("up", "-d", "--no-build", *services)

    def remove(self) -> None:
        """Removes the project; measurements are kept."""
        self.compose("down", "--volumes", "--timeout", "2", "--remove-orphans")

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        label = f"label=com.docker.compose.service={service}"
        own = f"label=com.docker.compose.project={self.name}"
        ids = self.engine.run("ps", "-aq", "--filter", own, "--filter", label).split()
        assert len(ids) == 1, f"{service} has {len(ids)} containers"
        return ids[0]

    def inspect(self, service: str) -> dict[str, Any]:
        """The engine's description of a service's container."""
        known: dict[str, Any] = json.loads(self.engine.run("inspect", self.container(service)))[0]
        return known

    def logs(self, service: str) -> str:
        """All that a service has printed."""
        return self.engine.run("logs", self.container(service))

    def everything(self) -> str:
        """The last output of all containers, for the message of a test that fails."""
        return self.compose("ps") + self.compose("logs", "--no-color", "--tail", "15")

    def await_lines(self, service: str, pattern: str, within_s: float = PATIENCE_S) -> list[str]:
        """Waits for a line that matches; returns all that do."""
        found: list[str] = []

        def seen() -> bool:
            found[:] = [line for line in self.logs(service).splitlines() if re.search(pattern, line)]
            return bool(found)

        self.wait(seen, f"a line of {service} like {pattern!r}", within_s)
        return found

    def await_exit(self, service: str, within_s: float = PATIENCE_S) -> int:
        """Waits until a container has ended; returns its exit status."""
        self.wait(lambda: not self.inspect(service)["State"]["Running"], f"the end of {service}", within_s)
        status: int = self.inspect(service)["State"]["ExitCode"]
        return status

    def wait(self, seen: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
        """Polls a condition until a deadline."""
        deadline = time.monotonic() + within_s
        while not seen():
            assert time.monotonic() < deadline, f"waited {within_s:.0f} s for {what}\n{self.everything()}"
            time.sleep(0.1)

    def within(self, service: str, *command: str) -> str:
        """The output of a program of this machine in the network namespace of a service's container."""
        pid = str(self.inspect(service)["State"]["Pid"])
        done = subprocess.run(
            ["nsenter", "--target", pid, "--net", *command], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)} in {service}: {done.stderr}"
        return done.stdout

    def address(self, service: str, network: str = "ring") -> str:
        """The address of a service's container on a network."""
        networks = self.inspect(service)["NetworkSettings"]["Networks"]
        address: str = networks[f"{self.name}_{network}"]["IPAddress"]
        return address

    def subnet(self, network: str = "ring") -> str:
        """The addresses of a network."""
        known = json.loads(self.engine.run("network", "inspect", f"{self.name}_{network}"))[0]
        subnet: str = known["IPAM"]["Config"][0]["Subnet"]
        return subnet

    def bridge(self, network: str = "ring") -> str:
        """The bridge of a network on this machine."""
        known = json.loads(self.engine.run("network", "inspect", f"{self.name}_{network}"))[0]
        return f"br-{known['Id'][:12]}"

    def interface(self, service: str, network: str = "ring") -> str:
        """The name that a network's interface has in a container."""
        address = re.escape(self.address(service, network))
        listed = self.within(service, "ip", "-4", "-o", "address")
        found = re.search(rf"\d+: (\S+) +inet {address}/", listed)
        assert found, listed
        return found[1]


def moment(text: str) -> float:
    """Seconds since 1970 of a time as the engine writes it, with nanoseconds."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    parsed = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.timezone.utc)
    return parsed.timestamp() + float(f"0.{fraction or 0}")


def is_local() -> bool:
    """Whether the containers' processes run on this machine, and it may enter their namespaces."""
    return os.geteuid() == 0
