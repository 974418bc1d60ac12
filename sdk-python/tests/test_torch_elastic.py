"""States and samplers of `ronde.torch.elastic`, alone and in jobs."""

from __future__ import annotations

import random
import types
from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

import ronde.torch as hvd  # noqa: E402
from ronde.torch import elastic, functions, mpi_ops, objects  # noqa: E402
from ronde.torch.elastic import sampler  # noqa: E402
from ronde.torch.elastic import state as states  # noqa: E402


@pytest.fixture
def world_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Returns a function that sets this process's rank and the number of ranks."""

    def set_world(rank: int, size: int) -> None:
        monkeypatch.setattr(mpi_ops, "rank", lambda: rank)
        monkeypatch.setattr(mpi_ops, "size", lambda: size)

    return set_world


@pytest.fixture
def alone(world_of: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one rank, whose broadcasts return their input."""
    world_of(0, 1)
    monkeypatch.setattr(elastic.TorchState, "_client", lambda state: types.SimpleNamespace(replay=None))
    monkeypatch.setattr(objects, "broadcast_object", lambda value, root_rank=0: value)
    monkeypatch.setattr(functions, "broadcast_parameters", lambda params, root_rank: None)
    monkeypatch.setattr(functions, "broadcast_optimizer_state", lambda optimizer, root_rank: None)


def of_all_ranks(
    world_of: Callable[[int, int], None], size: int, processed: int = 0, **options: Any
) -> list[list[int]]:
    found = []
    for rank in range(size):
        world_of(rank, size)
        each = elastic.ElasticSampler(range(10), **options)
        each.load_state_dict({"epoch": 2, "processed_num": processed})
        assert len(each) == len(list(each))
        found.append(list(each))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_ranks_divide_a_dataset(world_of: Callable[[int, int], None], size: int) -> None:
    parts = of_all_ranks(world_of, size, shuffle=False)
    assert {len(part) for part in parts} == {-(-10 // size)}
    interleaved = [index for group in zip(*parts) for index in group]
    assert interleaved == [index % 10 for index in range(len(interleaved))]


def test_the_order_is_that_of_seed_and_epoch(world_of: Callable[[int, int], None]) -> None:
    expected = list(range(10))
    random.Random(7 + 2).shuffle(expected)
    assert of_all_ranks(world_of, 1, seed=7) == [expected]
    assert of_all_ranks(world_of, 2, seed=7) == [expected[0::2], expected[1::2]]


def test_processed_samples_are_skipped_and_the_rest_is_redistributed(world_of: Callable[[int, int], None]) -> None:
    world_of(1, 2)
    first = elastic.ElasticSampler(range(10), shuffle=False)
    first.set_epoch(4)
    first.record_batch(0, 2)
    first.record_batch(1, 1)
    assert first.state_dict() == {"epoch": 4, "processed_num": 6}
    assert (first.rank, first.size, first.num_replicas, first.num_samples, first.total_size) == (1, 2, 2, 5, 10)
    assert (first.processed_indices, first.remaining_indices) == ([], list(range(10)))
    world_of(0, 3)
    first.reset()
    assert (first.rank, first.size, first.num_replicas, first.num_samples, first.total_size) == (0, 3, 3, 2, 6)
    assert (first.processed_indices, first.remaining_indices) == (list(range(6)), list(range(6, 10)))
    assert list(first) == first.indices == [6, 9]
    world_of(2, 3)
    first.reset()
    # The rest does not come out even: its first ones are used twice.
    assert list(first) == first.indices == [8, 7]
    first.set_epoch(5)
    assert (first.processed_num, len(first)) == (0, 4)


def test_no_sample_remains_at_the_end(world_of: Callable[[int, int], None]) -> None:
    assert of_all_ranks(world_of, 3, processed=10) == [[], [], []]
    assert of_all_ranks(world_of, 3, processed=12) == [[], [], []]
    assert of_all_ranks(world_of, 4, processed=9, shuffle=False) == [[9], [9], [9], [9]]


def trained(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def values_of(model: Any, optimizer: Any) -> list[Any]:
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [value.clone() for value in (*model.parameters(), *state)]


@pytest.mark.usefixtures("alone")
def test_a_training_restores_repeatedly() -> None:
    """Adam's state is changed in place, which must not reach what was saved."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trained(model, optimizer)
    state = elastic.TorchState(model, optimizer, epoch=1)
    before = values_of(model, optimizer)
    for _ in range(2):
        trained(model, optimizer)
        state.epoch = 2
        assert not torch.equal(before[0], next(model.parameters()))
        state.restore()
        assert all(torch.equal(was, now) for was, now in zip(before, values_of(model, optimizer)))
        assert state.epoch == 1
    trained(model, optimizer)
    state.commit()
    after = values_of(model, optimizer)
    state.restore()
    assert all(torch.equal(was, now) for was, now in zip(after, values_of(model, optimizer)))


@pytest.mark.usefixtures("alone")
def test_an_object_of_the_state_can_be_replaced() -> None:
    state = elastic.TorchState(torch.nn.Linear(1, 1), batch=0)
    assert state.optimizer is None
    other = torch.nn.Linear(1, 1)
    weight = other.weight.detach().clone()
    state.model = other
    with torch.no_grad():
        other.weight += 1
    state.restore()
    assert state.model is other
    assert torch.equal(other.weight, weight)


@pytest.mark.usefixtures("alone")
def test_samplers_of_any_name_are_part_of_the_state(world_of: Callable[[int, int], None]) -> None:
    each = elastic.ElasticSampler(range(8), shuffle=False)
    state = elastic.TorchState(sampler=each, epoch=0)
    each.record_batch(0, 3)
    state.commit()
    each.record_batch(1, 3)
    state.restore()
    assert each.processed_num == 3
    world_of(1, 2)
    state.on_reset()
    assert list(each) == [4, 6, 3]
    state.sync()
    assert each.processed_num == 3


@pytest.mark.usefixtures("alone")
def test_further_kinds_of_objects_can_be_added() -> None:
    class Counter:
        count = 0

    class CounterHandler(states.StateHandler):
        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.save()

    registry = states.get_handler_registry()
    assert [kind for kind, _ in registry] == [torch.nn.Module, torch.optim.Optimizer, sampler.ElasticSampler]
    states.set_handler_registry([(Counter, CounterHandler), *registry])
    try:
        counter = Counter()
        state = elastic.TorchState(counter=counter)
        counter.count = 5
        state.restore()
        assert counter.count == 0
    finally:
        states.set_handler_registry(registry)
    handler = states.StateHandler.__new__(states.StateHandler)
    for unfinished in (handler.save, handler.restore, handler.sync):
        with pytest.raises(NotImplementedError):
            unfinished()


def test_elastic_is_an_attribute_of_ronde_torch() -> None:
    assert hvd.elastic is elastic


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 1), (2, 2)])
def test_a_job_restores_and_continues(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    pytest.importorskip("cloudpickle")
    assert world("elastic.py", ranks, sidecars).count("restored and continued") == ranks


def test_a_lost_rank_ends_the_job(world: Callable[..., str]) -> None:
    pytest.importorskip("cloudpickle")
    with pytest.raises(AssertionError, match="rank 1 on host localhost exited with code 5"):
        world("elastic.py", 2, 1, "lost")


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_states_that_differ_are_an_error(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    pytest.importorskip("cloudpickle")
    assert world("elastic_alike.py", ranks, sidecars).count("states are compared") == ranks
