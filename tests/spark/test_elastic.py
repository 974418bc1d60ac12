"""`ronde.spark.run_elastic`: executors come and go while a job trains."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import tempfile
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ronde.private_folder import own_base
from test_run import check_gone, wait_until

# There is no other network.
OPTIONS = {"nics": "lo", "start_timeout": 240}


def train(folder: str, steps: int, stop: str = "") -> tuple[int, int, int]:
    """Counts steps together; stops where a file says so. Returns steps, size, and the number of memberships."""
    import ronde.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 1)
    state = hvd.elastic.TorchState(model, step=0)
    memberships = []

    @hvd.elastic.run
    def run(state: Any) -> None:
        memberships.append(hvd.size())
        print(f"now {hvd.size()} ranks", flush=True)
        # Whole when it appears.
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

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.results: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(arguments, options), daemon=True)
        self._thread.start()

    def _run(self, arguments: Any, options: Any) -> None:
        import ronde.spark

        try:
            self.results = ronde.spark.run_elastic(train, args=arguments, **OPTIONS, **options)
        except BaseException as error:
            self.error = error

    def ended(self) -> Any:
        self._thread.join(400)
        assert not self._thread.is_alive(), "the job has not ended"
        if self.error is not None:
            raise self.error
        return self.results


def executor_above(pid: int) -> int:
    """The executor above a worker."""
    while b"CoarseGrainedExecutorBackend" not in pathlib.Path("/proc", str(pid), "cmdline").read_bytes():
        pid = int(pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1, "the worker has no executor above it"
    return pid


def left_in_temporary_folders() -> list[str]:
    places = {own_base(), pathlib.Path(tempfile.gettempdir())}
    prefixes = ("ronde-spark-*", "ronde-call-*")
    return [path.name for place in places for prefix in prefixes for path in place.glob(prefix)]


def test_a_lost_executor_and_a_new_one(cluster: Any, tmp_path: pathlib.Path) -> None:
    out = io.StringIO()
    job = Job(str(tmp_path), 20, "stop", num_proc=2, min_num_proc=1, max_num_proc=2, stdout=out)
    wait_until(lambda: (tmp_path / "size-2").exists() or job.error)
    assert job.error is None, job.error
    wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)))
    os.kill(executor_above(int((tmp_path / "pid-1").read_text())), signal.SIGKILL)
    wait_until(lambda: (tmp_path / "size-1").exists() or job.error)
    (tmp_path / "size-2").unlink()
    # Spark starts another executor.
    wait_until(lambda: (tmp_path / "size-2").exists() or job.error)
    (tmp_path / "stop").touch()
    results = job.ended()
    assert [size for _, size, _ in results] == [2, 2]
    assert len({step for step, _, _ in results}) == 1
    assert "<stdout>:now 1 ranks" in out.getvalue()
    check_gone([int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)])
    wait_until(lambda: not left_in_temporary_folders())


def test_a_worker_that_raises_ends_the_job_with_its_traceback(cluster: Any) -> None:
    import ronde.spark

    def fail() -> None:
        raise LookupError("no such digit")

    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*LookupError: no such digit"):
        ronde.spark.run_elastic(fail, num_proc=2, min_num_proc=2, max_num_proc=2, **OPTIONS)


@pytest.mark.parametrize("hosts", [{}, {"10.76.0.1": 1}])
def test_a_host_that_settings_exclude_ends_the_job_also_beside_others(hosts: dict[str, int]) -> None:
    from ronde.errors import RondeError
    from ronde.spark.elastic import _Job

    job = _Job(None, [], 2, 2, "train", {})  # type: ignore[arg-type]
    job._hub = SimpleNamespace(hosts=lambda: hosts, close=lambda: None)  # type: ignore[assignment]
    job._failed(RondeError("ronde sends no key", "settings"))
    with pytest.raises(RondeError, match="ronde sends no key"):
        job.check()


def test_numbers_that_contradict_each_other_are_refused(cluster: Any) -> None:
    import ronde.spark

    for numbers in ({"num_proc": 2, "max_num_proc": 1}, {"num_proc": 1, "min_num_proc": 2}, {"min_num_proc": 0}):
        with pytest.raises(ValueError, match="none is less than the one before"):
            ronde.spark.run_elastic(train, **numbers)
    with pytest.raises(ValueError, match="min_np and its newer name are both given"):
        ronde.spark.run_elastic(train, min_np=1, min_num_proc=1)
