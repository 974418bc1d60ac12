"""`RayExecutor` on a real cluster: what functions return, and what happens when something fails."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from conftest import HEAD_CPUS, OTHER_CPUS
from ronde.errors import RondeError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of what ends within seconds: the test fails where it takes this long.
WAIT_MAX_S = 180


@pytest.fixture
def executor(cluster: Any) -> Iterator[Any]:
    """Two started ranks."""
    from ronde.ray import RayExecutor

    made = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    made.start()
    yield made
    made.shutdown()


@pytest.fixture(scope="session")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "job-secret"
    subprocess.run([os.environ["RONDE_BIN"], "certs", "secret", str(path)], check=True, capture_output=True)
    return str(path)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_MAX_S
    while not condition():
        assert time.monotonic() < deadline, "it has not happened in time"
        time.sleep(0.1)


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0))


def living_nodes() -> int:
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def check_nothing_is_left() -> None:
    wait_until(lambda: free_cpus() == HEAD_CPUS + OTHER_CPUS)
    # Ray notices the end of a node after some seconds, and gives it actors until then.
    wait_until(lambda: living_nodes() == 2)


def reduced(scale: int) -> dict[str, Any]:
    """A collective of each kind of input that may go wrong: ragged, empty, strided."""
    import ronde.torch as hvd
    import torch

    hvd.init()
    rank = hvd.rank()
    found = {
        "rank": rank,
        "size": hvd.size(),
        "local": (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        "sum": hvd.allreduce(torch.arange(12.0).reshape(3, 4).t() * (rank + scale), op=hvd.Sum).tolist(),
        "gathered": hvd.allgather(torch.full((rank, 2), float(rank))).tolist(),
        "empty": tuple(hvd.allreduce(torch.zeros(0), op=hvd.Sum).shape),
        "pid": os.getpid(),
    }
    hvd.shutdown()
    return found


def check_reduced(found: list[dict[str, Any]], scale: int) -> None:
    size = len(found)
    assert [each["rank"] for each in found] == list(range(size))
    total = sum(rank + scale for rank in range(size))
    for each in found:
        assert each["size"] == size
        assert numpy.array_equal(each["sum"], numpy.arange(12.0).reshape(3, 4).T * total)
        assert each["gathered"] == [[float(rank)] * 2 for rank in range(size) for _ in range(rank)]
        assert each["empty"] == (0,)


def test_each_rank_returns_its_result_and_one_call_follows_another(executor: Any) -> None:
    import ray

    first = executor.run(reduced, args=[1])
    check_reduced(first, 1)
    assert [each["local"] for each in first] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    again = executor.run(reduced, kwargs={"scale": 5})
    check_reduced(again, 5)
    assert [each["pid"] for each in again] == [each["pid"] for each in first]
    check_reduced(ray.get(executor.run_remote(reduced, args=[2]), timeout=WAIT_MAX_S), 2)
    assert executor.execute(lambda worker: (worker, os.environ["RONDE_RANK"])) == [(None, "0"), (None, "1")]
    assert executor.execute_single(lambda _: os.environ["HOROVOD_RANK"]) == "0"


def test_callbacks_get_what_rank_0_reports(executor: Any) -> None:
    def report() -> int:
        from ronde.ray import log

        for step in range(3):
            log({"rank": os.environ["RONDE_RANK"], "step": step})
        return 7

    values: list[Any] = []
    assert executor.run(report, callbacks=[values.append]) == [7, 7]
    assert values == [{"rank": "0", "step": step} for step in range(3)]


def test_a_callback_that_fails_does_not_hide_that_a_rank_failed(
    cluster: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ronde.ray import RayExecutor, WorkerError

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start()
    raised = tmp_path / "raised"

    def train() -> None:
        from ronde.ray import log

        log("one")
        raised.touch()
        raise LookupError("no such digit")

    def callback(value: str) -> None:
        wait_until(raised.exists)
        time.sleep(20)  # the failure of the rank is known by then
        raise OSError(f"cannot store {value}")

    try:
        with pytest.raises(WorkerError, match=r"(?s)^rank . of 2 .*LookupError: no such digit"):
            executor.run(train, callbacks=[callback])
        assert "cannot store one" in caplog.text
    finally:
        executor.shutdown()
    check_nothing_is_left()


def test_a_callback_that_fails_ends_the_run(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start()

    def train() -> None:
        from ronde.ray import log

        log("one")
        time.sleep(600)

    def callback(value: str) -> None:
        raise OSError(f"cannot store {value}")

    try:
        with pytest.raises(OSError, match="cannot store one"):
            executor.run(train, callbacks=[callback])
    finally:
        executor.shutdown()
    check_nothing_is_left()


def test_horovods_adapters_and_parameters(cluster: Any) -> None:
    from horovod.ray.adapter import Adapter
    from horovod.ray.elastic_v2 import ElasticAdapter, ElasticParams
    from horovod.ray.runner import RayExecutor, StaticAdapter, StaticParams

    static, elastic = StaticParams(num_workers=2), ElasticParams(min_workers=1, max_workers=2)
    assert (static.elastic, static.adapter) == (False, StaticAdapter)
    assert (elastic.elastic, elastic.adapter) == (True, ElasticAdapter)
    settings = RayExecutor.create_settings(timeout_s=60)
    with pytest.raises(NotImplementedError, match="fixed number of workers"):
        elastic.adapter(settings, **elastic.named()).run_remote(print)
    for params in (StaticParams, ElasticParams):
        with pytest.raises(ValueError, match="set use_gpu=True"):
            params(gpus_per_worker=1)
    adapter = static.adapter(settings, **static.named())
    assert isinstance(adapter, Adapter)
    adapter.start()
    try:
        check_reduced(adapter.run(reduced, args=[1]), 1)
        assert adapter.execute_single(lambda _: os.environ["HOROVOD_RANK"]) == "0"
    finally:
        adapter.shutdown()
    check_nothing_is_left()


def test_horovods_settings_objects(cluster: Any) -> None:
    from horovod.ray import ElasticRayExecutor, RayExecutor
    from horovod.runner.common.util.settings import Settings
    from horovod.runner.common.util.timeout import Timeout
    from horovod.runner.elastic.settings import ElasticSettings

    settings = Settings(verbose=2, nics={"lo"}, start_timeout=Timeout(60, "{activity}"))
    executor = RayExecutor(settings, num_workers=2)
    assert (executor.settings.timeout_s, executor.settings.interfaces()) == (60.0, "lo")
    executor.start()
    try:
        check_reduced(executor.run(reduced, args=[1]), 1)
    finally:
        executor.shutdown()
    elastic = ElasticSettings(None, 2, 3, 7, None, [5, 9], num_proc=2)
    adopted = ElasticRayExecutor(elastic).settings
    assert (adopted.min_num_proc, adopted.max_num_proc, adopted.elastic_timeout) == (2, 3, 7)
    assert (adopted.cooldown_range, adopted.timeout_s, adopted.discovery) == ([5, 9], 30, None)
    check_nothing_is_left()


def test_networks_that_nodes_have_in_common(cluster: Any) -> None:
    import ray
    from horovod.ray import BaseHorovodWorker
    from horovod.ray.runner import MiniSettings
    from horovod.ray.utils import detect_nics, nics_to_env_var

    assert nics_to_env_var({"eth0"})["HOROVOD_GLOO_IFACE"] == "eth0"
    assert detect_nics(MiniSettings(nics={"eth1", "eth0"})) == ["eth0", "eth1"]
    assert detect_nics(MiniSettings(nics="eth0")) == ["eth0"]
    assert detect_nics(MiniSettings(), ["localhost"]) == ["lo"]
    with pytest.raises(ValueError, match=r"10\.99\.99\.99 are other hosts; give node_workers"):
        detect_nics(MiniSettings(), ["localhost", "10.99.99.99"])
    workers = [ray.remote(BaseHorovodWorker).options(num_cpus=0).remote() for _ in range(2)]
    with pytest.raises(RuntimeError, match="no network interface with a common name: none; none"):
        detect_nics(MiniSettings(), node_workers=workers)
    subprocess.run(["ip", "link", "add", "one7", "type", "veth", "peer", "name", "two7"], check=True)
    try:
        assert detect_nics(MiniSettings(), node_workers=workers) == ["one7", "two7"]
    finally:
        subprocess.run(["ip", "link", "del", "one7"], check=True)
        for worker in workers:
            ray.kill(worker)


class Counter:
    """A class of which each worker keeps an object."""

    def __init__(self, start: int, by: int = 1) -> None:
        import ronde.torch as hvd

        hvd.init()
        self.count, self.by = start, by

    def step(self) -> float:
        import ronde.torch as hvd
        import torch

        self.count += self.by
        return float(hvd.allreduce(torch.tensor(float(self.count + hvd.rank())), op=hvd.Sum))


def test_workers_keep_an_object_and_variables(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start(Counter, executable_args=[10], executable_kwargs={"by": 2}, extra_env_vars={"FLAVOUR": "lemon"})
    try:
        with pytest.raises(RuntimeError, match="call shutdown"):
            executor.start()
        assert [executor.execute(lambda counter: counter.step()) for _ in range(2)] == [[25.0] * 2, [29.0] * 2]
        assert executor.execute(lambda _: os.environ["FLAVOUR"]) == ["lemon"] * 2
    finally:
        executor.shutdown()
    check_nothing_is_left()


def sidecar_of_worker() -> int | None:
    from ronde.cluster import sidecars

    started = sidecars._own.sidecar
    return None if started is None else started.process.pid


def test_two_nodes_have_a_sidecar_each(cluster: Any, secret: str) -> None:
    from ronde.ray import RayExecutor

    settings = RayExecutor.create_settings(timeout_s=60, job_secret_file=secret)
    executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=2)
    executor.start()
    try:
        found = executor.run(reduced, args=[3])
        check_reduced(found, 3)
        assert [each["local"] for each in found] == [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]
        nodes = executor.execute(lambda _: __import__("ray").get_runtime_context().get_node_id())
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        sidecars = executor.execute(lambda _: sidecar_of_worker())
        assert [pid is not None for pid in sidecars] == [True, False, True, False]
        processes = [*(pid for pid in sidecars if pid), *(each["pid"] for each in found)]
    finally:
        executor.shutdown()
    check_nothing_is_left()
    wait_until(lambda: not any(pathlib.Path("/proc", str(pid)).exists() for pid in processes))


def test_nodes_of_this_host_need_no_credentials(
    cluster: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver writes a secret to a file that all sidecars read, and removes it."""
    from ronde.ray import RayExecutor

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_hosts=2)
    executor.start()
    try:
        check_reduced(executor.run(reduced, args=[2]), 2)
        sidecars = executor.execute(lambda _: sidecar_of_worker())
        arguments = pathlib.Path("/proc", str(sidecars[0]), "cmdline").read_bytes().decode().split("\0")
        file = pathlib.Path(arguments[arguments.index("--job-secret-file") + 1])
        assert file.parent.parent == tmp_path
        assert list(tmp_path.iterdir()) == []
    finally:
        executor.shutdown()
    check_nothing_is_left()


def test_nodes_with_directories_of_their_own_need_credentials(
    cluster: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers of one host have: the workers do not see the driver's file."""
    from ronde.ray import RayExecutor, job

    monkeypatch.setattr(job, "in_file", lambda _: contextlib.nullcontext(str(tmp_path / "not-there")))
    with pytest.raises(RondeError, match="Ray's connections are plaintext") as caught:
        RayExecutor(RayExecutor.create_settings(timeout_s=60), num_hosts=2).start()
    assert caught.value.cause == "settings"
    check_nothing_is_left()


def test_a_secret_that_others_can_read_is_refused(cluster: Any, secret: str, tmp_path: pathlib.Path) -> None:
    from ronde.ray import RayExecutor

    copy = tmp_path / "open"
    copy.write_text(pathlib.Path(secret).read_text())
    copy.chmod(0o644)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60, job_secret_file=str(copy)), num_hosts=2)
    with pytest.raises(RondeError, match=r"rank 0 \(node .*has mode 0644"):
        executor.start()
    check_nothing_is_left()


def test_one_certificate_for_two_nodes_is_refused(cluster: Any, tmp_path: pathlib.Path) -> None:
    from ronde.ray import RayExecutor

    made = [os.environ["RONDE_BIN"], "certs", "once", "--job", "nightly", "--sidecars", "0-1", str(tmp_path / "certs")]
    subprocess.run(made, check=True, capture_output=True)
    settings = RayExecutor.create_settings(timeout_s=60, certs=str(tmp_path / "certs" / "sidecar-1"))
    with pytest.raises(RondeError, match=r"not those of one job with the indices 0 to 1: .*: sidecar 1 of job nightly"):
        RayExecutor(settings, num_hosts=2).start()
    settings.certs = str(tmp_path)
    with pytest.raises(RondeError, match=r"cert.pem on .* cannot be read as the certificate of a sidecar"):
        RayExecutor(settings, num_hosts=2).start()
    check_nothing_is_left()


def test_a_killed_actor_ends_the_run_on_all_ranks(cluster: Any) -> None:
    from ronde.ray import RayExecutor, WorkerError

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=3)
    executor.start()

    def train() -> None:
        import ronde.torch as hvd
        import torch

        hvd.init()
        for step in range(100_000):
            if hvd.rank() == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(3))

    pids = executor.execute(lambda _: os.getpid())
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"^rank 1 of 3 on node .* has ended") as caught:
        executor.run(train)
    assert time.monotonic() - begun < WAIT_MAX_S
    assert (caught.value.rank, caught.value.node) == (1, os.uname().nodename)
    wait_until(lambda: not any(pathlib.Path("/proc", str(pid)).exists() for pid in pids))
    with pytest.raises(RuntimeError, match=r"cannot be used any more: .*; call shutdown\(\), then start\(\)"):
        executor.run(train)
    executor.shutdown()
    executor.start()
    check_reduced(executor.run(reduced, args=[1]), 1)
    executor.shutdown()
    check_nothing_is_left()


def test_the_loss_of_a_node_ends_the_run(cluster: Any, secret: str, tmp_path: pathlib.Path) -> None:
    from ronde.ray import RayExecutor, WorkerError

    node = cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    settings = RayExecutor.create_settings(timeout_s=90, job_secret_file=secret, nics="lo")
    executor = RayExecutor(settings, num_hosts=3)

    def train() -> None:
        import ronde.torch as hvd
        import torch

        hvd.init()
        for step in range(1_000_000):
            hvd.allreduce(torch.ones(3))
            if step == 20:
                (tmp_path / str(hvd.rank())).touch()

    try:
        executor.start()
        nodes = executor.execute(lambda _: __import__("ray").get_runtime_context().get_node_id())
        lost = nodes.index(node.node_id)

        def remove() -> None:
            wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
            cluster.remove_node(node, allow_graceful=False)

        remover = threading.Thread(target=remove, daemon=True)
        remover.start()
        with pytest.raises(WorkerError, match=rf"^rank {lost} of 3 on node .* has ended"):
            executor.run(train)
        remover.join(WAIT_MAX_S)
    finally:
        executor.shutdown()
    check_nothing_is_left()


def test_a_rank_that_raises_ends_those_that_wait_for_it(cluster: Any) -> None:
    from ronde.ray import RayExecutor, WorkerError

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start()

    def train() -> None:
        import ronde.torch as hvd
        import torch

        hvd.init()
        if hvd.rank() == 1:
            raise LookupError("no such digit")
        hvd.allreduce(torch.ones(3))

    with pytest.raises(WorkerError, match=r"(?s)^rank 1 of 2 .* ended: rank 0\n.*LookupError: no such digit") as caught:
        executor.run(train)
    assert isinstance(caught.value.__cause__, LookupError)
    executor.shutdown()
    check_nothing_is_left()


def test_ranks_that_all_raise_keep_their_workers(executor: Any) -> None:
    from ronde.ray import WorkerError

    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        executor.run(lambda: 1 // 0)
    check_reduced(executor.run(reduced, args=[1]), 1)


def test_a_call_after_a_failed_one_does_not_report_to_its_callbacks(executor: Any) -> None:
    from ronde.ray import WorkerError

    def report(fails: bool) -> int:
        from ronde.ray import log

        log("one")
        return 1 // (not fails)

    values: list[Any] = []
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        executor.run(report, args=[True], callbacks=[values.append])
    assert values == ["one"]
    assert executor.run(report, args=[False]) == [1, 1]


def test_the_loss_of_an_actor_of_the_function_is_not_that_of_the_worker(executor: Any) -> None:
    import ray
    from ronde.ray import WorkerError

    def lose() -> None:
        class Helper:
            def end(self) -> None:
                os._exit(1)

        ray.get(ray.remote(num_cpus=0)(Helper).remote().end.remote())

    with pytest.raises(WorkerError, match=r"^rank \d of 2 on .* failed"):
        executor.run(lose)
    check_reduced(executor.run(reduced, args=[1]), 1)


def test_an_interrupt_ends_the_workers(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    executor.start()
    pids = executor.execute(lambda _: os.getpid())
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(lambda: time.sleep(600))
    wait_until(lambda: not any(pathlib.Path("/proc", str(pid)).exists() for pid in pids))
    executor.shutdown()
    check_nothing_is_left()


def test_more_workers_than_slots_wait_and_end_with_the_count(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    from ronde.ray import RayExecutor

    settings = RayExecutor.create_settings(placement_group_timeout_s=4)
    wanted = r"9 workers are wanted, with 1 CPU each. The 2 nodes of the cluster have slots for 5; 5 CPU are free now"
    with pytest.raises(TimeoutError, match=rf"within 4 s: {wanted}"):
        RayExecutor(settings, num_workers=9).start()
    assert "waiting for places of workers" in caplog.text
    hosts = r"3 hosts for 1 workers each are wanted, with 1 CPU each. The 2 nodes of the cluster have slots for 2"
    with pytest.raises(TimeoutError, match=hosts):
        RayExecutor(settings, num_hosts=3).start()
    check_nothing_is_left()


def test_ranks_of_a_node_see_its_gpus_in_their_order(cluster: Any) -> None:
    """Ray only keeps the books of these GPUs."""
    from ronde.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2, use_gpu=True)
    executor.start()
    own = executor.execute(lambda _: __import__("ray").get_gpu_ids())
    seen = executor.execute(lambda _: os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    executor.shutdown()
    assert seen[0] == seen[1] == [str(gpu) for gpus in own for gpu in gpus]
    assert sorted(seen[0]) == ["0", "1"]


def test_workers_run_in_the_placement_group_of_the_caller(cluster: Any) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_cpus=0)
    def driver(count: int) -> Any:
        from ronde.ray import RayExecutor

        executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=count)
        executor.start()
        found = executor.execute(lambda _: ray.util.get_current_placement_group().id.hex())
        executor.shutdown()
        return found

    group = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK")
    assert group.wait(WAIT_MAX_S)
    within = driver.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group))
    assert ray.get(within.remote(2), timeout=WAIT_MAX_S) == [group.id.hex()] * 2
    with pytest.raises(ValueError, match=r"3 workers with 1 CPU each do not fit .* room for 2"):
        ray.get(within.remote(3), timeout=WAIT_MAX_S)
    remove_placement_group(group)
    check_nothing_is_left()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "either num_workers, or num_hosts"),
        ({"num_workers": 1, "num_hosts": 1}, "either num_workers, or num_hosts"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_hosts": 1, "num_workers_per_host": 0}, "num_workers_per_host is 0"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "set use_gpu=True"),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 0}, "gpus_per_worker is 0"),
    ],
)
def test_contradicting_arguments_are_refused(given: dict[str, Any], match: str, cluster: Any) -> None:
    from ronde.ray import RayExecutor

    with pytest.raises(ValueError, match=match):
        RayExecutor(**given)


def test_an_executor_must_be_started(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    with pytest.raises(RuntimeError, match=r"call start\(\) first"):
        RayExecutor(num_workers=1).run(print)


@pytest.mark.parametrize("release", ["2.9.3", "1.13.0", "3.0.0", "nightly"])
def test_an_unsupported_ray_is_named(release: str, cluster: Any) -> None:
    from ronde.ray import version

    with pytest.raises(ImportError, match=rf"Ray {release} is installed, but ronde.ray needs Ray 2.51 or a later"):
        version.check(release)
    for supported in ["2.51.0", "2.60.0", "2.100.1"]:
        version.check(supported)
