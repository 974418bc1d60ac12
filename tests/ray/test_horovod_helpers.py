"""What of horovod.ray and ronde.ray needs no cluster."""

from __future__ import annotations

import pathlib
import pickle

import pytest
from coverage_names import check_imports


def test_the_coordinator_numbers_the_hosts_that_have_a_local_rank() -> None:
    from horovod.ray.runner import Coordinator, MiniSettings

    coordinator = Coordinator(MiniSettings())
    for rank, host in enumerate(["a", "b", "b"]):
        coordinator.register(host, host, rank)
    found = coordinator.finalize_registration()
    numbers = [[found[rank][f"HOROVOD_{name}"] for name in ("CROSS_RANK", "CROSS_SIZE")] for rank in range(3)]
    assert numbers == [[0, 2], [1, 2], [0, 1]]


def test_the_discovery_of_the_program_is_used_or_missed() -> None:
    """Without one, a job that does not want Ray's table of nodes would run on all of them."""
    from ronde.ray import ElasticRayExecutor, RayExecutor

    class Discovery(dict[str, int]):
        """An object that counts as false."""

        def find_available_hosts_and_slots(self) -> dict[str, int]:
            return self

    given = Discovery()
    with pytest.raises(ValueError, match="the settings have no discovery"):
        ElasticRayExecutor(ElasticRayExecutor.create_settings(), override_discovery=False)
    executor = RayExecutor(RayExecutor.create_settings(discovery=given), min_workers=1, override_discovery=False)
    assert executor._workers.discovery is given
    older = ElasticRayExecutor(ElasticRayExecutor.create_settings(discovery=given), override_discovery=False)
    assert older._workers.discovery is given


def test_values_that_threads_of_a_worker_report_do_not_replace_each_other(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread reports while this one opens the folder."""
    from ronde.private_folder import PrivateFolder
    from ronde.ray import worker

    tmp_path.chmod(0o700)
    monkeypatch.setenv(worker.REPORTS, str(tmp_path))
    monkeypatch.setenv("RONDE_WORKER", "0")
    others = ["second"]

    def opened(path: pathlib.Path) -> PrivateFolder:
        if others:
            worker._leave(others.pop())
        return PrivateFolder(path)

    monkeypatch.setattr(worker, "PrivateFolder", opened)
    worker._leave("first")
    values = [pickle.loads(file.read_bytes()) for file in sorted(tmp_path.glob("value.0.*"))]
    assert values == ["first", "second"]


@pytest.mark.parametrize("package", ["horovod.ray", "ronde.ray"])
def test_names_of_the_page_of_coverage_have_their_parameters(package: str) -> None:
    check_imports(package)
