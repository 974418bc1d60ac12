"""The remote shell of an elastic job on Ray: `python -m ronde.ray.remote_shell FOLDER HOST COMMAND...`.

`ronde run --remote-shell` starts it for each host. It runs the command on a node of Ray, in an actor that holds the
resources of the workers there, and connects standard input and output to it. FOLDER is that of the call; the driver has
written which node the host is. Certificates for the node's sidecar travel over this connection. So it is refused unless
Ray's connections use TLS, or the node is this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ronde.cluster.agent import in_order
from ronde.private_folder import PrivateFolder
from ronde.processes import own_host
from ronde.ray.agent import Agent
from ronde.ray.nodes import uses_tls
from ronde.run import CALL

if TYPE_CHECKING:
    from collections.abc import Sequence

# The driver's settings, in the folder of the call.
SETTINGS = "ray.json"
# The exit status of ssh for its own failures.
_FAILED = 255
_METHODS_MAX = 16
_PIECE_BYTES = 1 << 20
_POLL_S = 0.5
# The share of the launcher's start timeout after which this gives up: its reason is to be known before the launcher's.
_START_SHARE = 0.8
# For the actor to remove its folder when the command has ended.
_REMOVE_S = 20.0


def main(arguments: Sequence[str]) -> int:
    """Runs the command on the node. Returns its exit status, or 255 with a message if that is not possible."""
    begun = time.monotonic()
    path, host, command = pathlib.Path(arguments[0]), arguments[1], " ".join(arguments[2:])
    with contextlib.closing(PrivateFolder(path)) as folder:
        settings = json.loads(folder.read(SETTINGS))
        node = settings["nodes"].get(host)
        if node is None:
            print(f"{host} is no node of the cluster of Ray any more", file=sys.stderr)
            return _FAILED
        ray.init(address=settings["address"], log_to_driver=False, logging_level="error", configure_logging=False)
        deadline = begun + _START_SHARE * settings["start_timeout_s"]
        try:
            return _run(node, host, command, folder, path, deadline)
        except ray.exceptions.GetTimeoutError:
            print(_described(host, node, time.monotonic() - begun), file=sys.stderr)
            return _FAILED
        except ray.exceptions.RayError as error:
            print(f"the actor on node {host} has ended: {str(error).splitlines()[0]}", file=sys.stderr)
            return _FAILED


def _described(host: str, node: dict[str, Any], waited: float) -> str:
    """Returns why no actor has started on a node: what it needs, and what the node has."""
    found = next((each for each in ray.nodes() if each["NodeID"] == node["id"]), None)
    if found is None or not found["Alive"]:
        return f"node {host} has left the cluster of Ray while its agent was starting"
    amounts = {"CPU": node["cpus"], "GPU": node["gpus"]}
    needs = " and ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount)
    has = " and ".join(f"{found['Resources'].get(name, 0):g} {name}" for name, amount in amounts.items() if amount)
    return (
        f"node {host} ({found['NodeManagerAddress']}, Ray's ID {node['id']}) has not started the actor of the workers "
        f"there within {waited:.0f} s. The actor needs {needs}; the node has {has} in all, and what other actors, "
        "tasks and placement groups of Ray hold is not free (`ray status -v` lists that). End these, add nodes, or "
        "raise timeout_s of the settings if the node only needs more time. The node is tried again later"
    )


def _run(
    node: dict[str, Any], host: str, command: str, folder: PrivateFolder, path: pathlib.Path, deadline: float
) -> int:
    """Raises GetTimeoutError if no actor has started by the deadline; none is left then."""
    options = {
        "num_cpus": node["cpus"],
        "num_gpus": node["gpus"],
        "max_concurrency": _METHODS_MAX,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node["id"], soft=False),
    }
    agent = ray.remote(Agent).options(**options).remote(str(path), folder.read(CALL), host)
    try:
        place = ray.get(agent.place.remote(), timeout=max(deadline - time.monotonic(), 0.0))
    except ray.exceptions.GetTimeoutError:
        # Otherwise Ray would start it when there is room, for nobody.
        ray.kill(agent)
        raise
    if not place.host.is_same(own_host()) and not (uses_tls() and place.has_tls):
        print(
            f"{place.described()} is another host, and Ray's connections are plaintext, so ronde sends no certificate "
            "over them: start Ray with RAY_USE_TLS=1 on all nodes and the driver (docs/RAY.md)",
            file=sys.stderr,
        )
        return _FAILED
    ray.get(agent.start.remote(command))
    threading.Thread(target=_feed, args=(agent,), daemon=True).start()
    readers = [threading.Thread(target=_pass_on, args=(agent, is_error)) for is_error in (False, True)]
    for reader in readers:
        reader.start()
    status = _watched(agent, folder)
    for reader in readers:
        reader.join()
    try:
        ray.get(agent.remove.remote(), timeout=_REMOVE_S)
    except ray.exceptions.GetTimeoutError:
        # Its folder goes with the actor's process.
        print(f"the actor on node {host} has not removed its folder within {_REMOVE_S:.0f} s", file=sys.stderr)
    return status


def _watched(agent: Any, folder: PrivateFolder) -> int:
    """Fetches what workers leave, until the command ends. Returns its exit status."""
    ending = agent.wait.remote()
    while True:
        ended, _ = ray.wait([ending], timeout=_POLL_S)
        taken = ray.get(agent.taken.remote())
        # The driver may read the folder between two of them.
        for name in in_order(taken):
            folder.replace(name, taken[name])
        if ended:
            status: int = ray.get(ending)
            return status


def _feed(agent: Any) -> None:
    """Passes standard input on, up to its end."""
    with contextlib.suppress(ray.exceptions.RayError):
        while True:
            content = os.read(sys.stdin.fileno(), _PIECE_BYTES)
            ray.get(agent.write.remote(content))
            if not content:
                return


def _pass_on(agent: Any, is_error: bool) -> None:
    """Passes standard output or error of the command on, up to its end."""
    descriptor = (sys.stderr if is_error else sys.stdout).fileno()
    with contextlib.suppress(ray.exceptions.RayError, BrokenPipeError):
        while content := ray.get(agent.read.remote(is_error)):
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
