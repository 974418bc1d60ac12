"""Plays the kubelet for the pods of a manifest: each pod is a host, each container a process with the manifest's
arguments, variables, user, groups and volumes.

What is not played: images (programs and libraries are those of this machine), the read-only root file system, limits of
memory, and the seccomp profile. compose's tests have those in containers of an engine.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

from conftest import ROOT
from hosts import Hosts, run

IMAGE = ROOT / "compose" / "image"
# Beside other tests a process may take ten seconds to start, and some start one after another.
PATIENCE_S = 120


class Pod:
    """One pod.

    host    -- its number among the hosts
    spec    -- of the manifest
    labels  -- as the controllers set them
    added   -- variables that a controller injects, by container; "*" for all
    secrets -- the content of each Secret, by name
    """

    def __init__(
        self,
        hosts: Hosts,
        host: int,
        spec: dict[str, Any],
        labels: dict[str, str],
        folder: pathlib.Path,
        secrets: dict[str, dict[str, bytes]],
        added: dict[str, dict[str, str]] | None = None,
    ) -> None:
        self.hosts, self.host, self.spec, self.labels = hosts, host, spec, labels
        self.folder, self.added = folder, added or {}
        self.running: dict[str, subprocess.Popen[str]] = {}
        # Further files of the images: (file, place, options).
        self.image_files: list[tuple[str, str, str]] = []
        folder.mkdir()
        folder.chmod(0o755)
        self.group = spec["securityContext"]["fsGroup"]
        for volume in spec["volumes"]:
            self._make_volume(volume, secrets)

    def _make_volume(self, volume: dict[str, Any], secrets: dict[str, dict[str, bytes]]) -> None:
        place = self.folder / volume["name"]
        place.mkdir()
        if "emptyDir" in volume:
            os.chown(place, 0, self.group)
            place.chmod(0o2777)
            return
        sources = [volume["secret"]] if "secret" in volume else [s["secret"] for s in volume["projected"]["sources"]]
        mode = (volume.get("secret") or volume["projected"])["defaultMode"]
        for source in sources:
            content = secrets[source.get("secretName") or source["name"]]
            items = source.get("items") or [{"key": key, "path": key} for key in content]
            self.write_secret(place, {item["path"]: content[item["key"]] for item in items}, mode)

    def write_secret(self, place: pathlib.Path, files: dict[str, bytes], mode: int) -> None:
        """Files of a Secret: root's, of the pod's group, links to a folder that is replaced at once."""
        for name, content in files.items():
            data = place / "..data"
            data.mkdir(exist_ok=True)
            fresh = data / f"{name}.new"
            fresh.write_bytes(content)
            os.chown(fresh, 0, self.group)
            fresh.chmod(mode)
            fresh.rename(data / name)
            if not (place / name).is_symlink():
                (place / name).symlink_to(f"..data/{name}")

    def prepare(self) -> None:
        """Runs the init containers that end, and starts those that stay, in order."""
        for container in self.spec["initContainers"]:
            process = self.start(container)
            if container.get("restartPolicy") != "Always":
                output, _ = process.communicate(timeout=PATIENCE_S)
                assert process.returncode == 0, output
                del self.running[container["name"]]

    def start(self, container: dict[str, Any], program: list[str] | None = None) -> subprocess.Popen[str]:
        """Starts a container; `program` takes the place of its command."""
        command = self.command(container, program)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={})
        self.running[container["name"]] = process
        return process

    def has_started(self, name: str) -> bool:
        """Whether the startup probe of a container succeeds."""
        container = self.container(name)
        assert self.running[name].poll() is None, self.running[name].communicate()[0]
        probe = self.command(container, container["startupProbe"]["exec"]["command"])
        return run(probe, PATIENCE_S, env={}).returncode == 0

    def await_start(self, name: str) -> None:
        """Waits until the startup probe of a container succeeds."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.has_started(name):
            assert time.monotonic() < deadline, f"{name} does not start"
            time.sleep(0.2)

    def end(self) -> dict[str, tuple[int, str]]:
        """Ends what runs, as a pod's sidecars end after its containers; status and output of each."""
        outcomes = {}
        for name, process in self.running.items():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
            outcomes[name] = (process.returncode, output)
        self.running.clear()
        return outcomes

    def kill(self) -> None:
        """Ends everything at once."""
        for process in self.running.values():
            process.kill()
            process.wait()

    def container(self, name: str) -> dict[str, Any]:
        """A container by its name."""
        found = [*self.spec.get("initContainers", []), *self.spec["containers"]]
        return next(container for container in found if container["name"] == name)

    def environment(self, container: dict[str, Any]) -> dict[str, str]:
        """The variables of a container, in which later ones may name earlier ones."""
        found = {**self.added.get("*", {}), **self.added.get(container["name"], {})}
        for entry in container.get("env", []):
            source = entry.get("valueFrom")
            found[entry["name"]] = (
                self._field(source["fieldRef"]["fieldPath"]) if source else expanded(entry["value"], found)
            )
        return found

    def _field(self, path: str) -> str:
        if path == "status.podIP":
            return self.hosts.address(self.host)
        key = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
        assert key is not None, path
        return self.labels[key[1]]

    def command(self, container: dict[str, Any], program: list[str] | None = None) -> list[str]:
        """The command line that runs a container."""
        environment = self.environment(container)
        words = program or [expanded(word, environment) for word in self._words(container)]
        place = {"python": sys.executable, "python3": sys.executable, "/usr/bin/ronde": os.environ["RONDE_BIN"]}
        words = [place.get(word, word) for word in words]
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        user = [
            "setpriv",
            f"--reuid={context['runAsUser']}",
            f"--regid={context['runAsGroup']}",
            f"--groups={self.group}",
            "--bounding-set=-all",
            "--inh-caps=-all",
            "--no-new-privs",
        ]
        # Like a container's image: PATH, and for workers the package ronde.
        path = f"{pathlib.Path(os.environ['RONDE_BIN']).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environment}
        assigned = [f"{name}={value}" for name, value in environment.items()]
        return self.hosts.on(self.host, [*user, "env", "-i", *assigned, *words], self._mounts(container))

    def _words(self, container: dict[str, Any]) -> list[str]:
        """Its command and arguments; without a command, what compose/Dockerfile says for its image."""
        image = container["image"].split(":")[0]
        entry = {"ronde-sidecar": ["/usr/bin/ronde"], "ronde-prepare": ["python3", str(IMAGE / "prepare.py")]}
        command = container.get("command") or entry[image]
        return [*command, *container.get("args", [])]

    def _mounts(self, container: dict[str, Any]) -> list[tuple[str, str, str]]:
        found = list(self.image_files)
        for mount in container.get("volumeMounts", []):
            source = self.folder / mount["name"] / mount.get("subPath", "")
            # The kubelet makes what does not exist.
            source.mkdir(exist_ok=True)
            found.append((str(source), mount["mountPath"], "ro" if mount.get("readOnly") else ""))
        # The sources are in this machine's /tmp, which a container's own hides.
        return sorted(found, key=lambda mount: mount[1] == "/tmp")


def expanded(text: str, environment: dict[str, str]) -> str:
    """The text with the values of $(NAME)."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), text)
