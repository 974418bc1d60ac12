"""Elastic jobs on Ray: workers, actors and nodes come and go while a job trains."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any

import pytest
from conftest import HEAD_CPUS, OTHER_CPUS
from test_executor import WAIT_MAX_S, check_nothing_is_left, wait_until


def settings() -> Any:
    from ronde.ray import RayExecutor

    # There is no other network.
    return RayExecutor.create_settings(timeout_s=90, nics="lo")


def train(folder: str, steps: int, stop: str = "") -> tuple[int, int, int]:
    """Counts steps together; stops where a file says so. Returns steps, size, and the number of memberships."""
    import ronde.torch as hvd
    import torch
    from ronde.ray import log

    hvd.init()
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model, step=0)
    memberships = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        memberships.append(hvd.size())
        log({"size": hvd.size()})
        # Whole when it appears, and before the size, which a test waits for.
        written = pathlib.Path(folder, f"writing-{os.getpid()}")
        written.write_text(str(os.getpid()))
        written.rename(pathlib.Path(folder, f"pid-{hvd.rank()}"))
        pathlib.Path(folder, f"size-{hvd.size()}").touch()
        while True:
            done = hvd.allreduce(torch.ones(3) * (state.step + 1), op=hvd.Sum, name="step")
            assert done.tolist() == [float((state.step + 1) * hvd.size())] * 3
            # All ranks see the file in the same step, or in none.
            stopped = hvd.allreduce(
                torch.tensor(float(not stop or pathlib.Path(folder, stop).exists())), op=hvd.Max, name="stop"
            )
            state.step += 1
            state.commit()
            if stopped and state.step >= steps:
                return
            time.sleep(0.02)

    run(state)
    return state.step, hvd.size(), len(memberships)


class Job:
    """An elastic job in a thread of this process."""

    def __init__(self, executor: Any, *arguments: Any, **options: Any) -> None:
        self.results: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(executor, arguments, options), daemon=True)
        self._thread.start()

    def _run(self, executor: Any, arguments: Any, options: Any) -> None:
        try:
            self.results = executor.run(train, args=arguments, **options)
        except BaseException as error:
            self.error = error

    def ended(self) -> Any:
        self._thread.join(240)
        assert not self._thread.is_alive(), "the job has not ended"
        if self.error is not None:
            raise self.error
        return self.results


def test_a_killed_worker_is_replaced(cluster: Any, tmp_path: pathlib.Path) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=2, max_workers=3)
    executor.start(extra_env_vars={"FLAVOUR": "lemon"})
    values: list[Any] = []
    job = Job(executor, str(tmp_path), 20, "stop", callbacks=[values.append])
    wait_until(lambda: ((tmp_path / "size-3").exists() and (tmp_path / "pid-2").exists()) or job.error)
    os.kill(int((tmp_path / "pid-2").read_text()), signal.SIGKILL)
    wait_until(lambda: (tmp_path / "size-2").exists() or job.error)
    (tmp_path / "size-3").unlink()
    wait_until(lambda: (tmp_path / "size-3").exists() or job.error)
    (tmp_path / "stop").touch()
    results = job.ended()
    assert [size for _, size, _ in results] == [3] * 3
    assert len({step for step, _, _ in results}) == 1
    assert {"size": 2} in values
    assert {"size": 3} in values
    executor.shutdown()
    check_nothing_is_left()


@pytest.mark.parametrize("returns", [False, True])
def test_the_actor_of_a_node_is_killed_and_the_other_node_goes_on(
    cluster: Any, tmp_path: pathlib.Path, returns: bool
) -> None:
    """The actor holds the workers of its node, as a host does; the node is used again after its cooldown."""
    from ronde.ray import RayExecutor

    every = HEAD_CPUS + OTHER_CPUS
    executor = RayExecutor(
        settings(), min_workers=2, max_workers=every, cooldown_range=None if returns else [3600, 3600]
    )
    executor.start()
    job = Job(executor, str(tmp_path), 20, "stop")
    full = f"size-{every}"
    wait_until(lambda: (tmp_path / full).exists() or job.error)
    wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == every or job.error)
    (tmp_path / full).unlink()
    pids = {int(path.read_text()) for path in tmp_path.glob("pid-*")}
    victim = actor_above(int((tmp_path / "pid-0").read_text()))
    others = {pid for pid in pids if actor_above(pid) != victim}
    assert len(others) in (HEAD_CPUS, OTHER_CPUS)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: (tmp_path / f"size-{len(others)}").exists() or job.error)
    if returns:
        # On a busy machine not all of its slots, as one whose worker starts too slowly is not used again.
        more = [tmp_path / f"size-{size}" for size in range(len(others) + 1, every + 1)]
        wait_until(lambda: any(path.exists() for path in more) or job.error)
    (tmp_path / "stop").touch()
    results = job.ended()
    assert [each[1] for each in results] == [len(results)] * len(results)
    assert (len(others) < len(results) <= every) if returns else len(results) == len(others)
    # The workers of the other node have lived on; they have counted each step once.
    assert len({step for step, _, _ in results}) == 1
    assert others <= {int(path.read_text()) for path in tmp_path.glob("pid-*")}
    executor.shutdown()
    check_nothing_is_left()


def test_a_node_whose_processors_are_taken_is_named(
    cluster: Any, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The discovery lists what a node has, not what is free. Another actor holds all of the head's processors."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from ronde.ray import RayExecutor

    @ray.remote
    class Busy:
        def ready(self) -> bool:
            return True

    head = cluster.head_node.node_id
    strategy = NodeAffinitySchedulingStrategy(head, soft=False)
    busy = Busy.options(num_cpus=HEAD_CPUS, scheduling_strategy=strategy).remote()
    assert ray.get(busy.ready.remote(), timeout=WAIT_MAX_S)
    try:
        given = RayExecutor.create_settings(timeout_s=25, nics="lo")
        executor = RayExecutor(given, min_workers=2)
        executor.start()
        job = Job(executor, str(tmp_path), 20, "stop")
        expected = f"has not started the actor of the workers there within 20 s. The actor needs {HEAD_CPUS} CPU"
        output = ""

        def is_named() -> bool:
            nonlocal output
            output += capfd.readouterr().err
            return f"Ray's ID {head}) {expected}" in output or job.error is not None

        # The job runs on the other node in the meantime.
        wait_until(lambda: (tmp_path / f"size-{OTHER_CPUS}").exists() or job.error)
        wait_until(is_named)
        assert job.error is None
        (tmp_path / "stop").touch()
        assert len(job.ended()) == OTHER_CPUS
        executor.shutdown()
    finally:
        ray.kill(busy)
    check_nothing_is_left()


def test_the_folder_of_an_actor_that_is_killed_is_removed(tmp_path: pathlib.Path) -> None:
    """As on another host, where the driver does not see it; no other process is left to remove it."""
    path = tmp_path / "ronde-call-x"
    program = (
        "import pathlib, sys, time; from ronde.ray.agent import Agent; "
        "agent = Agent(sys.argv[1], b'call', 'ray-1'); agent.start('sleep 600'); "
        "print(agent._process.pid, flush=True); time.sleep(600)"
    )
    holders = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    commands = []
    try:
        for holder in holders:
            assert holder.stdout is not None
            commands.append(int(holder.stdout.readline()))
        assert (path / "call").read_bytes() == b"call"
        assert len(removers_of(path)) == 2
        holders[0].kill()
        holders[0].wait()
        wait_until(lambda: len(removers_of(path)) == 1)
        assert (path / "call").exists(), "another agent of this host uses the folder"
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
        for pid in commands:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not path.exists())
    wait_until(lambda: not removers_of(path))


def removers_of(path: pathlib.Path) -> list[int]:
    """The processes that remove a folder when its agent has ended: the path is their last argument."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")[:-1]
            if words[-1:] == [str(path).encode()] and b"-I" in words:
                found.append(int(entry.name))
    return found


def test_agents_of_a_host_share_a_folder_and_the_last_one_removes_it(tmp_path: pathlib.Path) -> None:
    from ronde.ray.agent import Agent

    path = tmp_path / "ronde-call-y"
    first, last = (Agent(str(path), b"new", host) for host in ("ray-1", "ray-2"))
    for agent in (first, last):
        agent.start("true")
        assert agent.wait() == 0
    assert (path / "call").read_bytes() == b"new"
    files = ["result.0", "value.0.9", "value.0.10"]
    for name in files:
        (path / name).write_bytes(b"seven")
        (path / name).chmod(0o600)
    # Callbacks get values in the order in which the rank has reported them.
    assert list(last.taken().items()) == [(name, b"seven") for name in files]
    assert first.taken() == {}
    first.remove()
    assert path.exists(), "another agent of this host uses the folder"
    last.remove()
    assert not path.exists()


def test_the_drivers_folder_is_neither_emptied_nor_removed(tmp_path: pathlib.Path) -> None:
    from ronde.ray.agent import Agent

    path = tmp_path / "ronde-call-z"
    path.mkdir(mode=0o700)
    (path / "call").touch(0o600)
    agent = Agent(str(path), b"new", "ray-1")
    agent.start("true")
    assert agent.wait() == 0
    (path / "result.0").touch(0o600)
    assert agent.taken() == {}
    agent.remove()
    assert (path / "result.0").exists()
    assert removers_of(path) == []


def actor_above(pid: int) -> int:
    """The process of Ray's actor above a worker."""
    while True:
        fields = pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        pid = int(fields[1])
        assert pid > 1, "the worker has no actor of Ray above it"
        if b"ray::Agent" in pathlib.Path("/proc", str(pid), "cmdline").read_bytes():
            return pid


def test_a_node_that_is_added_gets_workers(cluster: Any, tmp_path: pathlib.Path) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=1)
    executor.start()
    before = HEAD_CPUS + OTHER_CPUS
    job = Job(executor, str(tmp_path), 20, "stop")
    wait_until(lambda: (tmp_path / f"size-{before}").exists() or job.error)
    node = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    try:
        wait_until(lambda: (tmp_path / f"size-{before + 1}").exists() or job.error)
        (tmp_path / "stop").touch()
        assert len(job.ended()) == before + 1
    finally:
        cluster.remove_node(node)
    executor.shutdown()
    check_nothing_is_left()


def test_hosts_of_a_discovery_of_the_program(cluster: Any) -> None:
    """It names the address of the nodes, and fewer slots than they have."""
    from ronde.ray import RayExecutor

    class Discovery:
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return {"127.0.0.1": 2, "10.99.99.99": 7}

    given = settings()
    given.discovery = Discovery()
    executor = RayExecutor(given, min_workers=2, max_workers=5, override_discovery=False)
    executor.start()
    assert len(executor.execute(lambda _: None)) == 2
    check_nothing_is_left()


def test_a_subclass_of_the_discovery_may_replace_either_method(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from horovod.ray.elastic_v2 import RayHostDiscovery, TestDiscovery
    from ronde.ray.discovery import slots_of_nodes

    class One(RayHostDiscovery):
        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return dict.fromkeys(super().find_available_hosts_and_slots(), 1)

    assert list(slots_of_nodes(One()).values()) == [1]
    steady = TestDiscovery(2, 5, change_frequency_s=600, cpus_per_slot=2, _graceful=False)
    assert sorted(slots_of_nodes(steady).values()) == [HEAD_CPUS // 2, OTHER_CPUS // 2]
    # Entries of another program's table: nodes are told apart by their addresses.
    entry = {"NodeID": "ab", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}
    entries = [{**entry, "NodeManagerAddress": address} for address in ("one", "two")]
    entries.append({**entries[0], "NodeManagerAddress": "three", "Alive": False})
    nodes_are(monkeypatch, entries)
    assert RayHostDiscovery(cpus_per_slot=3).find_available_hosts_and_slots() == {"one": 2, "two": 2}
    gpus = RayHostDiscovery(use_gpu=True, gpus_per_slot=2)
    assert gpus.find_available_hosts_and_slots() == {"one": 1, "two": 1}


def nodes_are(monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]]) -> None:
    """Replaces Ray's table of nodes."""
    import ray

    monkeypatch.setattr(ray, "nodes", lambda: entries)


def test_a_table_of_horovods_tests_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries have "alive", and no ID."""
    from horovod.ray.elastic_v2 import RayHostDiscovery, TestDiscovery

    alive = [{"NodeManagerAddress": f"host-{each}", "alive": True, "Resources": {"CPU": 2}} for each in range(3)]
    nodes_are(monkeypatch, [*alive, {**alive[0], "NodeManagerAddress": "lost", "alive": False}])
    assert list(RayHostDiscovery().find_available_hosts_and_slots().values()) == [2, 2, 2]
    some = TestDiscovery(1, 2, change_frequency_s=600)
    assert some.find_available_hosts_and_slots() == {"host-0": 2, "host-1": 2}


def test_a_discovery_of_the_program_names_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By address, by a resource of the node, as Horovod schedules, and by host name."""
    from ronde.ray.discovery import slots_of_nodes

    def found(*names: str) -> dict[str, int]:
        discovery = types.SimpleNamespace(find_available_hosts_and_slots=lambda: dict.fromkeys(names, 2))
        return slots_of_nodes(discovery, reported)

    reported: set[str] = set()
    entry = {"NodeID": "ab", "Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "alpha"}
    nodes_are(monkeypatch, [{**entry, "Resources": {"CPU": 8.0, "node:10.0.0.1": 1.0, "node:host-1": 1.0}}])
    for name in ("10.0.0.1", "host-1", "alpha"):
        assert found(name) == {"ab": 2}
    assert found("host-1", "alpha") == {"ab": 4}
    assert caplog.text == ""
    for _ in range(2):
        assert found("nowhere") == {}
    assert caplog.text.count("names nowhere") == caplog.text.count("have the addresses 10.0.0.1") == 1


def test_the_actor_of_a_node_holds_no_more_than_max_workers_need(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    import ray
    from ronde.ray.elastic import ElasticOptions, ElasticWorkers
    from ronde.ray.settings import MiniSettings

    entry = {"NodeID": "ab", "Alive": True, "NodeManagerAddress": "one", "Resources": {"CPU": 8.0, "GPU": 8.0}}
    nodes_are(monkeypatch, [entry])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "one")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: types.SimpleNamespace(gcs_address="one:1"))
    tmp_path.chmod(0o700)
    for most, count in ((1, 1), (9, 4), (None, 4)):
        ElasticWorkers(MiniSettings(), ElasticOptions(1, most, 2, use_gpu=True))._write(tmp_path)
        assert (tmp_path / "hosts").read_text() == f"ray-ab:{count}\n"
        nodes = json.loads((tmp_path / "ray.json").read_text())["nodes"]
        assert nodes == {"ray-ab": {"id": "ab", "cpus": 2 * count, "gpus": count}}


def test_workers_see_the_gpus_of_their_node(cluster: Any) -> None:
    """Ray only keeps the books of these GPUs."""
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=2, max_workers=2, use_gpu=True)
    executor.start()
    assert executor.execute(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]) == ["0,1"] * 2
    check_nothing_is_left()


def test_an_interrupt_ends_the_job(cluster: Any, tmp_path: pathlib.Path) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=2, max_workers=2)
    executor.start()
    begun, folder = threading.Event(), str(tmp_path)

    def interrupt() -> None:
        wait_until(lambda: all((tmp_path / name).exists() for name in ("size-2", "pid-0", "pid-1")))
        begun.set()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(train, args=[folder, 20, "stop"])
    assert begun.is_set()
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    wait_until(lambda: not any(pathlib.Path("/proc", str(pid)).exists() for pid in pids))
    check_nothing_is_left()


def report() -> None:
    """Reports a value as rank 0, and does not end."""
    import ronde.torch as hvd
    from ronde.ray import log

    hvd.init()
    log("one")
    time.sleep(600)


def test_an_interrupt_does_not_wait_for_a_callback(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=2, max_workers=2)
    executor.start()
    begun, free, returned = threading.Event(), threading.Event(), threading.Event()

    def callback(value: str) -> None:
        begun.set()
        free.wait(WAIT_MAX_S)
        returned.set()

    def interrupt() -> None:
        assert begun.wait(WAIT_MAX_S)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            executor.run(report, callbacks=[callback])
        assert not returned.is_set()
    finally:
        free.set()
    assert f"{callback.__qualname__} has not returned" in caplog.text
    check_nothing_is_left()


def test_a_callback_that_fails_ends_the_job(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=2, max_workers=2)
    executor.start()

    def callback(value: str) -> None:
        raise OSError(f"cannot store {value}")

    with pytest.raises(OSError, match="cannot store one"):
        executor.run(report, callbacks=[callback])
    check_nothing_is_left()


def test_a_callback_that_fails_at_the_end_is_not_forgotten(tmp_path: pathlib.Path) -> None:
    from ronde.ray.elastic_reports import ElasticReports
    from ronde.run import dumps

    values = []

    def callback(value: int) -> None:
        values.append(value)
        if value == 9:
            raise OSError("cannot store it")

    tmp_path.chmod(0o700)
    for number in (9, 10):
        (tmp_path / f"value.0.{number}").write_bytes(dumps(number))
        (tmp_path / f"value.0.{number}").chmod(0o600)
    reports = ElasticReports([callback])
    reports.start(tmp_path)
    reports.end(None)
    assert values == [9, 10]
    with pytest.raises(OSError, match="cannot store it"):
        reports.check()


def test_a_function_that_fails_ends_the_job_with_its_traceback(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=2, max_workers=2, reset_limit=1)
    executor.start()

    def fail() -> None:
        raise LookupError("no such digit")

    with pytest.raises(RuntimeError, match=r"(?s)one or more processes exited with non-zero.*no such digit"):
        executor.run(fail)
    check_nothing_is_left()


def test_a_rank_that_ends_its_process_without_a_result_is_named(cluster: Any) -> None:
    """The highest rank, so that no other result has a higher number."""
    from ronde.ray import RayExecutor

    def leave() -> None:
        import ronde.torch as hvd

        hvd.init()
        rank = hvd.rank()
        hvd.shutdown()
        if rank == 1:
            os._exit(0)

    executor = RayExecutor(settings(), min_workers=2, max_workers=2)
    executor.start()
    with pytest.raises(RuntimeError, match="without the results of the ranks 1:"):
        executor.run(leave)
    check_nothing_is_left()


def test_too_few_slots_end_with_the_count(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=9, elastic_timeout=3)
    executor.start()
    with pytest.raises(RuntimeError, match=r"9"):
        executor.run(os.getpid)


def test_horovods_elastic_executor(cluster: Any, tmp_path: pathlib.Path) -> None:
    from horovod.ray import ElasticRayExecutor
    from horovod.ray.elastic import RayHostDiscovery

    assert RayHostDiscovery(cpus_per_slot=2).find_available_hosts_and_slots() == {"127.0.0.1": 2}
    assert RayHostDiscovery(use_gpu=True, cpus_per_slot=1).find_available_hosts_and_slots() == {"127.0.0.1": 2}
    given = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, timeout_s=90, nics="lo", verbose=True)
    executor = ElasticRayExecutor(given, cpus_per_slot=1, env_vars={"FLAVOUR": "lemon"})
    executor.start()
    folder = str(tmp_path)
    assert executor.run(lambda: (train(folder, 5), os.environ["FLAVOUR"])) == [((5, 2, 1), "lemon")] * 2


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"min_workers": 1, "num_workers": 1}, "give only one"),
        ({"max_workers": 1, "num_workers": 1}, "min_workers is not"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers is 2, less than"),
        ({"min_workers": 0}, "min_workers is 0"),
        ({"min_workers": 1, "override_discovery": False}, "the settings have no discovery"),
    ],
)
def test_contradicting_arguments_are_refused(given: dict[str, Any], match: str, cluster: Any) -> None:
    from ronde.ray import RayExecutor

    with pytest.raises(ValueError, match=match):
        RayExecutor(**given)


def test_an_elastic_job_has_no_single_workers(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(min_workers=1)
    for call in (lambda: executor.run_remote(print), lambda: executor.execute_single(print)):
        with pytest.raises(NotImplementedError, match="an elastic job has run and execute"):
            call()
    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        executor.run(print)
