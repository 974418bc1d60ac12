"""The backend "RONDE" of `ray.util.collective`, on actors of a real cluster, compared with NumPy."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from ronde.errors import RondeError
from test_executor import check_nothing_is_left, secret  # noqa: F401  (a fixture)

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

WAIT_MAX_S = 180
COUNT = 3
OPERATIONS = {"SUM": numpy.add, "PRODUCT": numpy.multiply, "MIN": numpy.minimum, "MAX": numpy.maximum}


class Member:
    """An actor of a group; a class that knows nothing of ronde."""

    def reduced(self, value: Any, operation: str, group: str = "default") -> Any:
        from ray.util import collective
        from ray.util.collective.types import ReduceOp

        array = value.copy()
        collective.allreduce(array, group, ReduceOp[operation])
        return array

    def everything(self, value: Any, root: int, group: str = "default") -> dict[str, Any]:
        from ray.util import collective

        rank, size = collective.get_rank(group), collective.get_collective_group_size(group)
        found: dict[str, Any] = {"rank": rank, "size": size}
        sent = value.copy()
        collective.broadcast(sent, root, group)
        to_root = value.copy()
        collective.reduce(to_root, root, group)
        gathered = [numpy.zeros_like(value) for _ in range(size)]
        collective.allgather(gathered, value, group)
        scattered = numpy.zeros_like(value)
        collective.reducescatter(scattered, [numpy.asarray(value * (each + 1)) for each in range(size)], group)
        collective.barrier(group)
        if rank == 0:
            collective.send(value, size - 1, group)
        received = numpy.zeros_like(value)
        if rank == size - 1:
            collective.recv(received, 0, group)
        found.update(sent=sent, to_root=to_root, gathered=gathered, scattered=scattered, received=received)
        return found

    def of_torch(self, rank: int) -> list[Any]:
        import torch
        from ray.util import collective

        strided = (torch.arange(6.0).reshape(2, 3) * (rank + 1)).t()
        collective.allreduce(strided)
        half = torch.full((5,), rank + 1.0, dtype=torch.bfloat16, requires_grad=True)
        collective.allreduce(half)
        parts = [torch.zeros(2, dtype=torch.int64) for _ in range(COUNT)]
        collective.allgather(parts, torch.full((2,), rank))
        return [strided.tolist(), half.tolist(), [part.tolist() for part in parts]]

    def failing(self, rank: int) -> str:
        from ray.util import collective

        try:
            if rank == 0:
                collective.send(numpy.zeros(3, "float32"), 1)
            elif rank == 1:
                collective.recv(numpy.zeros((3, 1), "float32"), 0)
        except ValueError as error:
            return str(error)
        return ""

    def crossed(self, groups: list[str], rank: int) -> dict[str, list[float]]:
        """Uses the groups in their order, each in a thread of its own, and returns what each has received."""
        import threading

        from ray.util import collective

        found: dict[str, list[float]] = {}

        def use(group: str) -> None:
            base = 100.0 if group == "left" else 1.0
            array, message = numpy.full(2, base * (rank + 1)), numpy.full(2, base)
            collective.allreduce(array, group)
            found[group] = array.tolist()
            if rank == 0:
                collective.send(message, 1, group)
            elif rank == 1:
                received = numpy.zeros(2)
                collective.recv(received, 0, group)
                found[f"{group} message"] = received.tolist()

        threads = [threading.Thread(target=use, args=(group,), daemon=True) for group in groups]
        for thread in threads:
            thread.start()
            thread.join(0.5)  # so that the first is usually submitted before the second; the result is the same anyway
        for thread in threads:
            thread.join(WAIT_MAX_S / 3)
        return found

    def has_group(self, group: str) -> bool:
        from ray.util import collective

        return bool(collective.is_group_initialized(group))

    def alone(self) -> str:
        from ray.util import collective
        from ronde.ray.collective import register

        register()
        try:
            collective.init_collective_group(COUNT, 0, "RONDE", "lonely")
        except Exception as error:
            return f"{getattr(error, 'cause', None)}: {error}"
        return "made"


@pytest.fixture(scope="module")
def kind(cluster: Any) -> Any:
    import ray

    return ray.remote(num_cpus=1)(Member)


@pytest.fixture(scope="module")
def members(kind: Any, secret: str) -> Iterator[Any]:  # noqa: F811
    """Actors on both nodes, and their group."""
    import ray
    from ronde.ray import RayExecutor
    from ronde.ray.collective import create_collective_group, shutdown

    actors = [kind.options(scheduling_strategy="SPREAD").remote() for _ in range(COUNT)]
    settings = RayExecutor.create_settings(timeout_s=90, job_secret_file=secret, nics="lo")
    create_collective_group(actors, settings=settings)
    yield actors
    shutdown(actors)
    for actor in actors:
        ray.kill(actor)
    check_nothing_is_left()


def called(actors: Any, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    import ray

    calls = [getattr(actor, name).remote(*given) for actor, given in zip(actors, arguments)]
    return ray.get(calls, timeout=WAIT_MAX_S)


def values(shape: tuple[int, ...], dtype: str, count: int = COUNT) -> list[Any]:
    random = numpy.random.default_rng(7)
    return [random.integers(1, 5, shape).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("operation", list(OPERATIONS))
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "float16"])
@pytest.mark.parametrize("shape", [(4, 3), (), (0, 2)])
def test_allreduce_is_that_of_numpy(members: Any, operation: str, dtype: str, shape: tuple[int, ...]) -> None:
    given = values(shape, dtype)
    wanted = given[0]
    for value in given[1:]:
        wanted = OPERATIONS[operation](wanted, value)
    for found in called(members, "reduced", [(value, operation) for value in given]):
        assert found.dtype == wanted.dtype
        assert numpy.array_equal(found, wanted)


def check_everything(found: list[Any], given: list[Any], root: int) -> None:
    total = sum(given[1:], given[0])
    for rank, each in enumerate(found):
        assert (each["rank"], each["size"]) == (rank, len(given))
        assert numpy.array_equal(each["sent"], given[root])
        assert numpy.array_equal(each["to_root"], total if rank == root else given[rank])
        assert all(numpy.array_equal(*pair) for pair in zip(each["gathered"], given))
        assert numpy.array_equal(each["scattered"], total * (rank + 1))
    assert numpy.array_equal(found[-1]["received"], given[0])


@pytest.mark.parametrize("shape", [(2, 5), (), (0,)])
def test_the_other_operations_are_those_of_numpy(members: Any, shape: tuple[int, ...]) -> None:
    given = values(shape, "float32")
    for root in (0, COUNT - 1):
        check_everything(called(members, "everything", [(value, root) for value in given]), given, root)


def test_tensors_of_pytorch(members: Any) -> None:
    found = called(members, "of_torch", [(rank,) for rank in range(COUNT)])
    factor = sum(range(1, COUNT + 1))
    strided = (numpy.arange(6.0).reshape(2, 3) * factor).T.tolist()
    assert found == [[strided, [float(factor)] * 5, [[rank] * 2 for rank in range(COUNT)]]] * COUNT


def test_a_group_of_some_actors_in_another_order(members: Any) -> None:
    from ronde.ray.collective import create_collective_group

    some = [members[2], members[0]]
    create_collective_group(some, group_name="some")
    given = values((3,), "float64", 2)
    check_everything(called(some, "everything", [(value, 1, "some") for value in given]), given, 1)
    create_collective_group(some, ranks=[1, 0], group_name="turned")
    turned = called(some, "everything", [(value, 0, "turned") for value in given])
    check_everything(turned[::-1], given[::-1], 0)


def test_two_groups_of_the_same_actors_in_opposite_order_do_not_mix_tensors(members: Any) -> None:
    from ronde.ray.collective import create_collective_group

    for name in ("left", "right"):
        create_collective_group(members, group_name=name)
    orders = [["left", "right"] if rank == 0 else ["right", "left"] for rank in range(COUNT)]
    found = called(members, "crossed", [(order, rank) for rank, order in enumerate(orders)])
    factor = float(sum(range(1, COUNT + 1)))
    for each in found:
        assert (each["left"], each["right"]) == ([100 * factor] * 2, [factor] * 2)
    assert (found[1]["left message"], found[1]["right message"]) == ([100.0] * 2, [1.0] * 2)


def test_a_group_that_some_actors_refuse_is_left_in_none_of_them(members: Any) -> None:
    from ronde.ray.collective import create_collective_group

    create_collective_group(members[1:], group_name="half")
    with pytest.raises(Exception, match="is in a group 'half' already"):
        create_collective_group(members, group_name="half")
    assert called(members, "has_group", [("half",)] * COUNT) == [False, True, True]
    # The earlier group of this name still works.
    given = values((3,), "float64", 2)
    check_everything(called(members[1:], "everything", [(value, 1, "half") for value in given]), given, 1)
    create_collective_group(members[:1], group_name="half")


def test_names_and_tags_are_those_of_one_group(cluster: Any) -> None:
    from ronde.ray.collective import GroupCalls, tag_of

    one, other, names = GroupCalls("one"), GroupCalls("other"), []

    def submit(name: str) -> Any:
        names.append(name)

    def refuse(name: str) -> Any:
        raise ValueError(name)

    one.start("reduce", submit)
    other.start("reduce", submit)
    with pytest.raises(ValueError, match=r"ray\.one\.reduce\.1"):
        one.start("reduce", refuse)
    for kind in ("reduce", "barrier"):
        one.start(kind, submit)
    assert names == ["ray.one.reduce.0", "ray.other.reduce.0", "ray.one.reduce.1", "ray.one.barrier.0"]
    tag = tag_of("one", {})
    assert 2**31 <= tag < 2**32
    assert tag_of("one", {"one": tag}) == tag != tag_of("other", {"one": tag})
    with pytest.raises(RondeError, match="'equal' and 'one' would have the same tag"):
        tag_of("one", {"equal": tag})


def test_a_tensor_that_does_not_fit_is_refused(members: Any) -> None:
    found = called(members, "failing", [(rank,) for rank in range(COUNT)])
    assert found == ["", "the result has the shape (3,), the tensor for it (3, 1)", ""]


def test_an_actor_without_a_job_communicates_with_nobody(members: Any, kind: Any) -> None:
    import ray
    from ronde.ray.collective import create_collective_group

    other = kind.remote()
    try:
        found = ray.get(other.alone.remote(), timeout=WAIT_MAX_S)
        assert found.startswith("settings: the group 'lonely' has 3 ranks, but this actor is in no job of ronde")
        with pytest.raises(RondeError, match=r"rank 0: no job; rank 1: rank 0 of job "):
            create_collective_group([other, members[0]], group_name="mixed")
        with pytest.raises(ValueError, match=r"ranks of 1 actors are 0 to 0 in some order, not \[1\]"):
            create_collective_group([other], ranks=[1])
    finally:
        ray.kill(other)


def test_workers_of_an_executor_make_a_group_of_all_ranks(
    cluster: Any,
    secret: str,  # noqa: F811
) -> None:
    from ronde.ray import RayExecutor

    def reduce() -> Any:
        import os

        from ray.util import collective
        from ronde.ray.collective import register

        register()
        rank, size = int(os.environ["RONDE_RANK"]), int(os.environ["RONDE_SIZE"])
        collective.init_collective_group(size, rank, "RONDE")
        array = numpy.full(3, rank + 1, "int64")
        collective.allreduce(array)
        collective.destroy_collective_group()
        return array.tolist()

    # The other actors may leave one processor on each node, so there may be two sidecars.
    settings = RayExecutor.create_settings(timeout_s=60, job_secret_file=secret, nics="lo")
    executor = RayExecutor(settings, num_workers=2)
    executor.start()
    try:
        assert executor.run(reduce) == [[3, 3, 3]] * 2
    finally:
        executor.shutdown()


def test_actors_of_two_nodes_without_credentials_are_refused_and_can_be_used_afterwards(
    cluster: Any,
    kind: Any,
    secret: str,  # noqa: F811
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes have directories of their own, as containers of one host have."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from ronde.ray import RayExecutor, job
    from ronde.ray.collective import create_collective_group, shutdown

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [
        kind.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in nodes
    ]
    monkeypatch.setattr(job, "in_file", lambda _: contextlib.nullcontext(str(tmp_path / "not-there")))
    try:
        with pytest.raises(RondeError, match="Ray's connections are plaintext"):
            create_collective_group(actors)
        create_collective_group(
            actors, settings=RayExecutor.create_settings(timeout_s=90, job_secret_file=secret, nics="lo")
        )
        assert [each.tolist() for each in called(actors, "reduced", [(numpy.ones(2), "SUM")] * 2)] == [[2.0, 2.0]] * 2
        shutdown(actors)
    finally:
        for actor in actors:
            ray.kill(actor)
