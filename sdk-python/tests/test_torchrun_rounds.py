"""The real `torchrun --rdzv-backend ronde --nnodes MIN:MAX`: nodes die, come later and return, and a network is cut."""

from __future__ import annotations

import contextlib
import pathlib
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
from conftest import WORKERS, ronde_binary
from ports import free_ports
from two_hosts import TwoHosts, ip, two_hosts

pytest.importorskip("torch")

from test_torchrun import begun, ended, environment, finished, metadata, reports, torchrun, wait_until

from ronde.torchrun.configuration import PORTS_OF_RANGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["metadata"]  # a fixture
WORKER = str(WORKERS / "torchrun_ddp.py")


class Job:
    """Agents of one job, on one host unless `on` gives each a host."""

    def __init__(self, metadata: pathlib.Path, folder: pathlib.Path, nodes: int, addresses: list[str]) -> None:
        self.metadata, self.folder = metadata, folder
        self.agents: list[subprocess.Popen[str]] = []
        first = free_ports(nodes)
        places = [f"{address}:{first + node * PORTS_OF_RANGE}" for node, address in enumerate(addresses)]
        self.endpoint = ",".join(places)
        self.secret = folder / "job-secret"
        self.enter: Callable[[int, list[str]], list[str]] = lambda node, command: command
        subprocess.run([ronde_binary(), "certs", "secret", str(self.secret)], check=True, capture_output=True)

    def begin(
        self, node: int, nnodes: str, *arguments: str, timeout: int = 200, last_call: int = 60, **conf: str
    ) -> subprocess.Popen[str]:
        settings = {
            "timeout": timeout,
            "last_call_timeout": last_call,
            "node_rank": node,
            "job_secret_file": self.secret,
        }
        command = torchrun(
            f"--nnodes={nnodes}",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-id=night",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-conf={','.join(f'{name}={value}' for name, value in {**settings, **conf}.items())}",
            *arguments,
        )
        # A home of its own for each node: agents remember rounds.
        home = self.folder / f"node-{node}"
        home.mkdir(mode=0o700, exist_ok=True)
        self.agents.append(begun(self.enter(node, command), environment(self.metadata, XDG_RUNTIME_DIR=str(home))))
        return self.agents[-1]

    def close(self) -> None:
        """Ends agents that a failed test leaves; their sidecars and workers end with them."""
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def until_trained(self, name: str, ranks: int) -> None:
        """Waits until as many ranks train in a round, in which the workers mark a folder of this name."""
        folder = self.folder / name
        wait_until(lambda: len(list(folder.glob("rank-*"))) == ranks, f"{ranks} ranks train ({name})")


def check_end(outputs: list[str], ranks: int) -> None:
    """All that have ended have trained in one world, with the same weights."""
    found = reports("".join(outputs))
    assert sorted((int(rank), int(size)) for rank, size, *_ in found) == [(rank, ranks) for rank in range(ranks)], (
        outputs
    )
    assert len({digest for *_, digest, _ in found}) == 1, outputs
    assert {listeners for *_, listeners in found} == {"0"}


@pytest.fixture
def job(metadata: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Job]:
    made = Job(metadata, tmp_path, 3, ["127.0.0.1"] * 3)
    yield made
    made.close()


@pytest.mark.heavy
def test_the_first_node_dies_and_returns(job: Job) -> None:
    """The others go on without it, and begin again when it is back; its workers have the same weights in the end."""
    mark = job.folder / "mark"
    mark.mkdir()
    options = [WORKER, "--seconds=40", f"--mark={mark}"]
    agents = [job.begin(node, "2:3", *options) for node in range(3)]
    job.until_trained("mark", 3)
    for file in mark.iterdir():
        file.unlink()
    agents[0].kill()
    agents[0].communicate()
    job.until_trained("mark", 2)
    for file in mark.iterdir():
        file.unlink()
    back = job.begin(0, "2:3", *options)
    job.until_trained("mark", 3)
    outputs = ended(agents[1], agents[2], back)
    assert [agent.returncode for agent in (agents[1], agents[2], back)] == [0, 0, 0], "\n".join(outputs)
    check_end(outputs, 3)


@pytest.mark.heavy
def test_a_node_that_comes_later_takes_part_in_the_next_round(job: Job) -> None:
    mark = job.folder / "mark"
    mark.mkdir()
    options = [WORKER, "--seconds=30", f"--mark={mark}"]
    agents = [job.begin(node, "2:3", *options, last_call=1) for node in (0, 1)]
    job.until_trained("mark", 2)
    agents.append(job.begin(2, "2:3", *options, last_call=1))
    job.until_trained("mark", 3)
    outputs = ended(*agents)
    assert [agent.returncode for agent in agents] == [0, 0, 0], "\n".join(outputs)
    check_end(outputs, 3)
    # Nobody has used a restart for it.
    assert {start for *_, start, _, _ in reports("".join(outputs))} == {"0"}


def test_too_few_nodes_wait_and_report_why(job: Job) -> None:
    agent = job.begin(1, "2:3", WORKER, timeout=30)
    output = finished(agent)
    assert agent.returncode != 0
    first = f"1 of at least 2 nodes have come. Not linked: node 0 ({job.endpoint.split(',')[0]}): it has not connected"
    assert first in output, output
    assert re.search(
        r"RendezvousTimeoutError: no round has begun within 30 s; 1 of at least 2 nodes wait for it", output
    ), output


@pytest.mark.heavy
def test_nodes_with_other_options_and_another_secret_are_named(job: Job) -> None:
    agents = [job.begin(0, "2:3", WORKER, timeout=60), job.begin(1, "1:3", WORKER, timeout=60)]
    outputs = ended(*agents)
    assert all(agent.returncode for agent in agents)
    assert any("--nnodes is '1:3' on node 1" in output or "--nnodes is '2:3' on node 0" in output for output in outputs)
    other = job.folder / "other"
    subprocess.run([ronde_binary(), "certs", "secret", str(other)], check=True, capture_output=True)
    agents = [
        job.begin(0, "2:3", WORKER, timeout=60),
        job.begin(1, "2:3", WORKER, timeout=60, job_secret_file=str(other)),
    ]
    outputs = ended(*agents)
    assert all(agent.returncode for agent in agents)
    assert all("is not signed by an authority of this job" in output for output in outputs), "\n".join(outputs)


@pytest.mark.heavy
def test_of_two_halves_that_are_cut_off_one_goes_on(metadata: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The half with the lowest node goes on. The other one waits, and times out with the count."""
    with two_hosts() as hosts, contextlib.closing(halves(hosts, metadata, tmp_path)) as job:
        mark = job.folder / "mark"
        mark.mkdir()
        options = [WORKER, "--seconds=45", f"--mark={mark}"]
        agents = [job.begin(node, "1:4", *options, timeout=60) for node in range(4)]
        job.until_trained("mark", 4)
        for file in mark.iterdir():
            file.unlink()
        ip("-n", hosts.names[0], "link", "set", "v0", "down")
        job.until_trained("mark", 2)
        outputs = ended(*agents)
    assert [bool(agent.returncode) for agent in agents] == [False, False, True, True], "\n".join(outputs)
    check_end(outputs[:2], 2)
    for output in outputs[2:]:
        assert not reports(output), output
        assert "2 of the 4 nodes of round 1 have come, and the others may train without these" in output, output
        # The one that times out first ends the other one's wait, too.
        assert "2 of at least 1 nodes wait for it" in output or "the job is over, as node" in output, output
    assert any("2 of at least 1 nodes wait for it" in output for output in outputs[2:]), "\n".join(outputs)


def halves(hosts: TwoHosts, metadata: pathlib.Path, folder: pathlib.Path) -> Job:
    """Nodes 0 and 1 are on the first host, 2 and 3 on the second one."""
    job = Job(metadata, folder, 4, [hosts.addresses[0]] * 2 + [hosts.addresses[1]] * 2)
    job.enter = lambda node, command: hosts.on(node // 2, command)
    return job
