"""The real `torchrun --rdzv-backend ronde`, on one host and on two."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Callable

import pytest
from conftest import PACKAGE, WORKERS, leave_out, ronde_binary
from digits_runs import EXAMPLES, WATCHED, Runner, check_same_training
from installed_wheel import describe_wheel
from process_sockets import Watch, descendants
from two_hosts import TwoHosts, two_hosts

pytest.importorskip("torch")

from ronde.torchrun.replica import Batch, Operation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COMPAT = PACKAGE.parent / "horovod-compat" / "src"
WORKER = str(WORKERS / "torchrun_ddp.py")
REPORT = r"rank (\d+) of (\d+), start (\d+): weights (\w+), (\d+) TCP listeners"
# On a busy machine each process imports PyTorch for a minute. A timeout ends a hang, so that its output is shown.
TIMEOUT_S = 400
MEET_TIMEOUT_S = 200


@pytest.fixture(scope="session")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return describe_wheel(tmp_path_factory.mktemp("metadata"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def environment(metadata: pathlib.Path, **variables: str) -> dict[str, str]:
    path = f"{PACKAGE}:{COMPAT}:{metadata}"
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "RONDE_BIN": ronde_binary(), "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_", "PET_"))}
    return {**inherited, **own, **variables}


def torchrun(*options: str, backend: str = "ronde") -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={backend}", *options]


def finished(process: subprocess.Popen[str], timeout: float = TIMEOUT_S) -> str:
    """Waits for a process and returns its output, or kills it and fails."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"{process.args} does not end:\n{output}")
    return output


def begun(command: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def check_reports(output: str, ranks: Sequence[int], size: int, start: int = 0) -> str:
    """Checks that these ranks have trained and have the same weights, without listeners; returns the weights."""
    found = sorted((int(rank), int(of), int(round_), listeners) for rank, of, round_, _, listeners in reports(output))
    assert found == [(rank, size, start, "0") for rank in ranks], output
    weights = {digest for *_, digest, _ in reports(output)}
    assert len(weights) == 1, output
    return weights.pop()


def reports(output: str) -> list[tuple[str, ...]]:
    return re.findall(REPORT, output)


# === One node ===


@pytest.mark.parametrize("options", [[], ["--hvd"]])
def test_workers_of_one_node_train(metadata: pathlib.Path, options: list[str]) -> None:
    command = torchrun("--nnodes=1", "--nproc-per-node=2", WORKER, "--seconds=1", *options)
    agent = begun(command, environment(metadata))
    watch = Watch(agent.pid)
    watch.start()
    output = finished(agent)
    watch.stop()
    assert agent.returncode == 0, output
    check_reports(output, [0, 1], 2)
    assert any("ronde" in program for program in watch.programs), watch.programs
    assert not [each for each in watch.found if each.is_reachable()]
    # Neither the agent nor a worker opens one, also not on the loopback.
    assert not [each for each in watch.found if not each.program.startswith("ronde")], watch.found


def test_a_worker_that_fails_is_started_again(metadata: pathlib.Path) -> None:
    command = torchrun("--nnodes=1", "--nproc-per-node=2", "--max-restarts=2", WORKER, "--fail-once=1")
    agent = begun(command, environment(metadata))
    output = finished(agent)
    assert agent.returncode == 0, output
    check_reports(output, [0, 1], 2, start=1)


def test_a_worker_that_fails_too_often_ends_the_job(metadata: pathlib.Path) -> None:
    command = torchrun("--nnodes=1", "--nproc-per-node=2", "--max-restarts=0", WORKER, "--fail-once=1")
    agent = begun(command, environment(metadata))
    output = finished(agent)
    assert agent.returncode != 0
    assert "exitcode  : 3" in output, output
    assert not reports(output)


def test_an_example_trains_as_with_ronde_run(metadata: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "metadata").mkdir()
    runner = Runner(ronde_binary(), tmp_path / "metadata", TIMEOUT_S)
    program = str(EXAMPLES / "ddp_digits.py")
    # Through files, as lines that both ranks print at once would be mixed.
    many = runner.by_other_launcher(torchrun("--nproc-per-node=2", "--tee=1", str(WATCHED), program)[1:])
    assert len(many.digests) == 2
    assert len(set(many.digests)) == 1
    check_same_training(many, runner.alone("ddp_digits.py"))


def test_the_variable_makes_the_default_group(metadata: pathlib.Path) -> None:
    program = str(WORKERS / "by_name.py")
    agent = begun(torchrun("--nproc-per-node=2", program, "automatic"), environment(metadata, RONDE_AUTOINIT="1"))
    output = finished(agent)
    assert agent.returncode == 0, output
    assert output.count("of 2 has the sum over ronde with 0 listeners") == 2


@pytest.mark.heavy
def test_gloo_works_in_the_same_job(metadata: pathlib.Path) -> None:
    """Its store listens then, where MASTER_ADDR and MASTER_PORT point."""
    agent = begun(torchrun("--nproc-per-node=2", str(WORKERS / "by_name.py"), "gloo"), environment(metadata))
    output = finished(agent)
    assert agent.returncode == 0, output
    assert len(re.findall("of 2 has the sum over gloo with [12] listeners", output)) == 2


# === The entry point ===

BROKEN = {
    "an exception": "raise OSError('a disk that fails')",
    "no extension": "from ronde import _ronde",
    "a syntax error": "this is not Python",
}


@pytest.mark.parametrize("reason", sorted(BROKEN))
def test_a_broken_ronde_does_not_break_torchrun(metadata: pathlib.Path, tmp_path: pathlib.Path, reason: str) -> None:
    (tmp_path / "ronde").mkdir()
    (tmp_path / "ronde" / "__init__.py").write_text(BROKEN[reason] + "\n")
    shutil.copy(PACKAGE / "ronde_entry_points.py", tmp_path)
    program = tmp_path / "program.py"
    program.write_text("print('trained')\n")
    variables = environment(metadata, PYTHONPATH=f"{tmp_path}:{metadata}")
    agent = begun(torchrun("--rdzv-endpoint=localhost:0", str(program), backend="c10d"), variables)
    output = finished(agent)
    assert (agent.returncode, output.count("trained")) == (0, 1), output
    assert "ronde" not in output
    agent = begun(torchrun(str(program)), variables)
    output = finished(agent)
    assert agent.returncode != 0
    assert '--rdzv-backend "ronde" cannot be used: `import ronde.torchrun` failed with' in output, output


def test_torchrun_loads_one_module_for_the_entry_point(metadata: pathlib.Path) -> None:
    code = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch.distributed.elastic.rendezvous.registry as registry
print(sorted(name for name in sys.modules if name.startswith("ronde")))
print("ronde" in registry.handler_registry._registry)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(metadata), capture_output=True, text=True, check=True
    )
    assert done.stdout == "['ronde_entry_points']\nTrue\n", done.stderr


# === Two nodes ===


class Nodes:
    """Two agents of a job, one on each host, with a secret of the job."""

    def __init__(self, hosts: TwoHosts, metadata: pathlib.Path, folder: pathlib.Path) -> None:
        self.hosts, self.metadata, self.folder = hosts, metadata, folder
        self.endpoint = ",".join(f"{address}:7400" for address in hosts.addresses)
        self.secret = folder / "job-secret"
        self.credentials = [f"job_secret_file={self.secret}"] * 2
        subprocess.run([ronde_binary(), "certs", "secret", str(self.secret)], check=True, capture_output=True)

    def begin(self, node: int, *arguments: str, workers: int = 2, restarts: int = 0, timeout: int = MEET_TIMEOUT_S,
              nodes: str = "2", **variables: str) -> subprocess.Popen[str]:  # fmt: skip
        configuration = [f"timeout={timeout}", self.credentials[node]]
        command = torchrun(
            f"--nnodes={nodes}",
            f"--nproc-per-node={workers}",
            f"--max-restarts={restarts}",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-conf={','.join(each for each in configuration if each)}",
            *arguments,
        )
        return begun(self.hosts.on(node, command), environment(self.metadata, **variables))


@pytest.fixture
def nodes(hosts: TwoHosts, metadata: pathlib.Path, tmp_path: pathlib.Path) -> Nodes:
    return Nodes(hosts, metadata, tmp_path)


def ended(*agents: subprocess.Popen[str]) -> list[str]:
    return [finished(agent) for agent in agents]


def ranks_of(outputs: Sequence[str]) -> list[list[int]]:
    return [sorted(int(rank) for rank, *_ in reports(output)) for output in outputs]


@pytest.mark.parametrize(("workers", "options"), [(2, []), (1, ["--hvd"])])
def test_workers_of_two_nodes_train_and_only_sidecars_can_be_reached(
    nodes: Nodes, workers: int, options: list[str]
) -> None:
    agents = [nodes.begin(node, WORKER, "--seconds=2", *options, workers=workers) for node in (0, 1)]
    watches = [Watch(agent.pid) for agent in agents]
    for watch in watches:
        watch.start()
    outputs = ended(*agents)
    for watch in watches:
        watch.stop()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    ranks = list(range(2 * workers))
    assert ranks_of(outputs) == [ranks[:workers], ranks[workers:]]
    check_reports("".join(outputs), ranks, 2 * workers)
    for address, watch in zip(nodes.hosts.addresses, watches):
        others = [each for each in watch.found if not each.program.startswith("ronde")]
        assert not others, "an agent or a worker has opened a port"
        reachable = {each for each in watch.found if each.is_reachable()}
        assert {each.address for each in reachable} == {address}
        assert {each.port for each in reachable} >= {7400, 7402}
        assert all(7400 <= each.port <= 7406 for each in reachable), reachable


@pytest.mark.heavy
def test_nothing_between_the_nodes_is_readable(nodes: Nodes) -> None:
    """Neither the agents' store, whose keys have a known text, nor what the workers send."""
    file = nodes.folder / "packets"
    with captured(nodes.hosts, file):
        agents = [nodes.begin(node, "--role=marker-of-a-role", WORKER, workers=1) for node in (0, 1)]
        outputs = ended(*agents)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    packets = file.read_bytes()
    assert len(packets) > 20_000
    key = b"torchelastic/role_info"
    assert key in Batch((Operation("set", key.decode(), b"marker-of-a-role"),)).encode(), "as an agent would send it"
    for text in (key, b"marker-of-a-role", b"ronde/workers", b"operations"):
        assert text not in packets
    listed = subprocess.run(["tcpdump", "-nn", "-r", str(file)], capture_output=True, text=True, check=True).stdout
    pairs = re.findall(r"IP6? \S+\.(\d+) > \S+\.(\d+):", listed)
    assert pairs
    assert all(any(7400 <= int(port) <= 7406 for port in pair) for pair in pairs), listed


@contextlib.contextmanager
def captured(hosts: TwoHosts, file: pathlib.Path) -> Iterator[None]:
    """Captures what the first host sends and receives while the context lasts."""
    if shutil.which("tcpdump") is None:
        leave_out("tcpdump", "tcpdump is not installed")
    command = ["ip", "netns", "exec", hosts.names[0], "tcpdump", "-i", "v0", "-U", "-w", str(file), "tcp or udp"]
    sniffer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert sniffer.stderr is not None
        assert any("listening on" in line for line in sniffer.stderr), "tcpdump has not begun"
        yield
    finally:
        sniffer.terminate()
        sniffer.communicate(timeout=TIMEOUT_S)


@pytest.mark.heavy
def test_certificates_name_the_nodes_which_may_have_different_numbers_of_workers(nodes: Nodes) -> None:
    certs = nodes.folder / "certs"
    made = [ronde_binary(), "certs", "once", "--job", "nightly", "--sidecars", "0-1", "--days", "1", str(certs)]
    subprocess.run(made, check=True, capture_output=True)
    nodes.credentials = [f"certs={certs}/sidecar-{node}" for node in (0, 1)]
    agents = [nodes.begin(0, WORKER, workers=1), nodes.begin(1, WORKER, workers=2)]
    outputs = ended(*agents)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert ranks_of(outputs) == [[0], [1, 2]]
    check_reports("".join(outputs), [0, 1, 2], 3)


@pytest.mark.heavy
@pytest.mark.parametrize("failing", [0, 1])
def test_workers_of_all_nodes_are_started_again(nodes: Nodes, failing: int) -> None:
    options = [WORKER, f"--fail-once={failing}", "--seconds=1"]
    agents = [nodes.begin(node, *options, workers=1, restarts=2) for node in (0, 1)]
    outputs = ended(*agents)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    assert ranks_of(outputs) == [[0], [1]], "\n".join(outputs)
    # The other agent may begin again before its own worker has failed, which then is not the second start there.
    (start,) = {start for rank, _, start, *_ in reports("".join(outputs)) if int(rank) == failing}
    assert start == "1"
    assert len({digest for *_, digest, _ in reports("".join(outputs))}) == 1


@pytest.mark.heavy
def test_a_node_without_restarts_left_ends_the_job_on_the_others(nodes: Nodes) -> None:
    agents = [nodes.begin(node, WORKER, "--fail-once=1", workers=1) for node in (0, 1)]
    outputs = ended(*agents)
    assert all(agent.returncode for agent in agents), "\n".join(outputs)
    assert "exitcode  : 3" in outputs[1], outputs[1]
    assert not reports("".join(outputs))


@pytest.mark.heavy
def test_an_agent_that_is_killed_ends_its_sidecars_and_can_be_replaced(nodes: Nodes) -> None:
    marked = [WORKER, "--seconds=12", f"--mark={nodes.folder}"]
    agents = [nodes.begin(node, *marked, workers=1, restarts=2) for node in (0, 1)]
    wait_until(lambda: len(list(nodes.folder.glob("rank-*"))) == 2, "all workers train")
    victims = children_of(agents[1].pid)
    agents[1].kill()
    agents[1].communicate()
    # Nobody ends the workers of an agent that was killed; without their sidecar they end by themselves.
    wait_until(lambda: not any(is_running(pid) for pid in victims), "the processes of the killed agent have ended")
    replacement = nodes.begin(1, *marked, workers=1, restarts=2)
    outputs = ended(agents[0], replacement)
    assert (agents[0].returncode, replacement.returncode) == (0, 0), "\n".join(outputs)
    assert ranks_of(outputs) == [[0], [1]]
    assert len({digest for *_, digest, _ in reports("".join(outputs))}) == 1


def test_a_node_that_is_missing_is_named(nodes: Nodes) -> None:
    agent = nodes.begin(0, WORKER, timeout=30)
    output = finished(agent)
    assert agent.returncode != 0
    assert "the agents of 2 nodes (10.76.0.1:7400, 10.76.0.2:7400) have not met within 30 s" in output, output
    assert re.search(r"RendezvousTimeoutError: .*node 1 \(10\.76\.0\.2:7400\)", output), output
    assert not re.search(r"RendezvousTimeoutError: .*node 0 \(10\.76\.0\.1:7400\)", output), output


@pytest.mark.heavy
def test_nodes_with_different_options_name_them(nodes: Nodes) -> None:
    """The certificates are those of one job, whatever the IDs are."""
    certs = nodes.folder / "certs"
    made = [ronde_binary(), "certs", "once", "--job", "nightly", "--sidecars", "0-1", "--days", "1", str(certs)]
    subprocess.run(made, check=True, capture_output=True)
    nodes.credentials = [f"certs={certs}/sidecar-{node}" for node in (0, 1)]
    agents = [nodes.begin(node, f"--rdzv-id={('night', 'day')[node]}", WORKER) for node in (0, 1)]
    for output, agent in zip(ended(*agents), agents):
        assert agent.returncode != 0
        assert "--rdzv-id is 'day' on node 1 (10.76.0.2:7400), but 'night' on node 0 (10.76.0.1:7400)" in output, output


def test_an_agent_that_is_ended_by_a_signal_leaves_nothing(metadata: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    command = torchrun("--nproc-per-node=1", WORKER, "--seconds=60", f"--mark={tmp_path}")
    agent = begun(command, environment(metadata, XDG_RUNTIME_DIR=str(tmp_path / "own")))
    wait_until((tmp_path / "rank-0").exists, "the worker trains")
    started = children_of(agent.pid)
    assert list((tmp_path / "own").glob("ronde-torchrun-*")), "the directory of the agent is where this test expects it"
    agent.terminate()
    finished(agent)
    wait_until(lambda: not any(is_running(pid) for pid in started), "all processes have ended")
    assert not list((tmp_path / "own").iterdir())


def test_another_secret_on_one_node_is_named(nodes: Nodes) -> None:
    other = nodes.folder / "other"
    subprocess.run([ronde_binary(), "certs", "secret", str(other)], check=True, capture_output=True)
    nodes.credentials[1] = f"job_secret_file={other}"
    agents = [nodes.begin(node, WORKER, timeout=45) for node in (0, 1)]
    for output, agent in zip(ended(*agents), agents):
        assert agent.returncode != 0
        assert not reports(output)
        assert "is not signed by an authority of this job" in output, output


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda path: path.chmod(0o644), "others may read it"),
        (lambda path: path.unlink(), "RONDE-E50"),
        (lambda path: path.write_text("secret"), "is not a job's secret"),
    ],
)
def test_a_secret_that_cannot_be_used_ends_the_agent_at_once(nodes: Nodes, change: object, text: str) -> None:
    change(nodes.secret)  # type: ignore[operator]
    begin = time.monotonic()
    agent = nodes.begin(0, WORKER, timeout=600)
    output = finished(agent)
    assert agent.returncode != 0
    assert text in output, output
    assert time.monotonic() - begin < TIMEOUT_S


@pytest.mark.parametrize(
    ("nnodes", "credentials", "text"),
    [
        ("1:3", None, "names 2 nodes, but --nnodes is 3"),
        ("3", None, "names 2 nodes, but --nnodes is 3"),
        ("2", "", "nodes need credentials by which they authenticate each other: --rdzv-conf job_secret_file=FILE"),
    ],
)
def test_bad_options_end_the_agent(nodes: Nodes, nnodes: str, credentials: str | None, text: str) -> None:
    if credentials is not None:
        nodes.credentials[0] = credentials
    agent = nodes.begin(0, WORKER, nodes=nnodes)
    output = finished(agent)
    assert agent.returncode != 0
    assert text in output, output


def children_of(pid: int) -> set[int]:
    return descendants(pid) - {pid}


def program_of(pid: int) -> str:
    try:
        return pathlib.Path(os.readlink(f"/proc/{pid}/exe")).name
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    return program_of(pid) != ""


def wait_until(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while not is_done():
        assert time.monotonic() < deadline, f"it is not so after {MEET_TIMEOUT_S} s that {what}"
        time.sleep(0.05)
