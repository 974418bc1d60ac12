"""Elastic jobs on Ray: workers, actors and nodes come and go while a job trains."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from typing import Any

import pytest
from conftest import HEAD_CPUS, OTHER_CPUS
from test_executor import check_nothing_is_left, wait_until


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
        pathlib.Path(folder, f"size-{hvd.size()}").touch()
        pathlib.Path(folder, f"pid-{hvd.rank()}").write_text(str(os.getpid()))
        while state.step < steps or (stop and not pathlib.Path(folder, stop).exists()):
            done = hvd.allreduce(torch.ones(3) * (state.step + 1), op=hvd.Sum, name="step")
            assert done.tolist() == [float((state.step + 1) * hvd.size())] * 3
            # All ranks see the file in the same step, or in none.
            stopped = hvd.allreduce(
                torch.tensor(float(bool(stop) and pathlib.Path(folder, stop).exists())), op=hvd.Max, name="stop"
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
    wait_until(lambda: (tmp_path / "size-3").exists() or job.error)
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


def test_the_actor_of_a_node_is_killed_and_the_other_node_goes_on(cluster: Any, tmp_path: pathlib.Path) -> None:
    """The actor holds the workers of its node, as a host does."""
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=2, max_workers=HEAD_CPUS + OTHER_CPUS)
    executor.start()
    job = Job(executor, str(tmp_path), 20, "stop")
    full = f"size-{HEAD_CPUS + OTHER_CPUS}"
    wait_until(lambda: (tmp_path / full).exists() or job.error)
    (tmp_path / full).unlink()
    victim = actor_above(int((tmp_path / "pid-0").read_text()))
    os.kill(victim, signal.SIGKILL)
    sizes = [f"size-{HEAD_CPUS}", f"size-{OTHER_CPUS}"]
    wait_until(lambda: any((tmp_path / size).exists() for size in sizes) or job.error)
    (tmp_path / "stop").touch()
    results = job.ended()
    assert len(results) in (HEAD_CPUS, OTHER_CPUS, HEAD_CPUS + OTHER_CPUS)
    executor.shutdown()
    check_nothing_is_left()


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
        wait_until((tmp_path / "size-2").exists)
        begun.set()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        executor.run(train, args=[folder, 20, "stop"])
    assert begun.is_set()
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    wait_until(lambda: not any(pathlib.Path("/proc", str(pid)).exists() for pid in pids))
    check_nothing_is_left()


def test_a_function_that_fails_ends_the_job_with_its_traceback(cluster: Any) -> None:
    from ronde.ray import RayExecutor

    executor = RayExecutor(settings(), min_workers=2, max_workers=2, reset_limit=1)
    executor.start()

    def fail() -> None:
        raise LookupError("no such digit")

    with pytest.raises(RuntimeError, match=r"(?s)one or more processes exited with non-zero.*no such digit"):
        executor.run(fail)
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
