"""Run by 4 ranks: groups of PyTorch on the backend "ronde", made by their members with PyTorch's own calls."""

from __future__ import annotations

import datetime
import inspect
import re
import sys
import threading
import time
import warnings
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ronde.torch.distributed
from ronde.torch.distributed.group import CAN_EXTEND_BACKEND, group_of


def total(group: object) -> float:
    """The sum of the members' ranks."""
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def check_plain_groups() -> None:
    first, second = dist.new_group([0, 2]), dist.new_group([1, 2, 3])
    if rank in (0, 2):
        assert total(first) == 2.0
    if rank in (1, 2, 3):
        assert total(second) == 6.0
    again = dist.new_group([0, 2])  # other operations under the same ranks
    if rank in (0, 2):
        works = [dist.all_reduce(torch.full((4,), 1.0), group=each, async_op=True) for each in (first, again, first)]
        assert all(work.wait() and work.result()[0].tolist() == [2.0] * 4 for work in works)


def check_messages_of_groups_with_the_same_ranks() -> None:
    """They are told apart, whichever the ranks wait for first."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank == 0:
        works = [dist.isend(torch.full((1,), value), 1, group) for value, group in ((1.0, first), (2.0, second))]
        assert all(work.wait() for work in works)
    elif rank == 1:
        place = torch.empty(1)
        for value, group in ((2.0, second), (1.0, first)):
            dist.recv(place, 0, group)
            assert place.item() == value


def check_groups_of_their_members_alone() -> None:
    """Ranks make other numbers of groups, in other orders, and other ranks are not needed."""
    if rank == 0:
        dist.barrier()
        return
    pairs = {1: [[1, 2], [1, 3]], 2: [[2, 3], [1, 2]], 3: [[1, 3], [2, 3]]}[rank]
    made = {tuple(pair): dist.new_group(pair, use_local_synchronization=True) for pair in pairs}
    for pair in ([1, 2], [1, 3], [2, 3]):
        if rank in pair:
            assert total(made[tuple(pair)]) == sum(pair)
    dist.barrier()


def check_a_group_that_others_do_not_make() -> None:
    """The first operation of the group fails after the group's timeout, and says who is awaited.

    It has not begun, so the group works when the last member has made it.
    """
    if rank == 0:
        alone = dist.new_group([0, 3], timeout=datetime.timedelta(seconds=0.5), use_local_synchronization=True)
        begun = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=alone)
        except RuntimeError as error:
            # The time that the operation had left: that of the group, less what has passed before the wait.
            left = re.search(r"\[0, 3\] have not made their group within (\d\S*) s", str(error))
            assert left, error
            assert float(left[1]) <= 0.5, error
            assert time.monotonic() - begun < 10
        else:
            raise AssertionError("rank 3 has not made the group")
        backend = group_of(alone)
        assert backend is not None
        backend.set_timeout(datetime.timedelta(seconds=60))
    dist.barrier()
    if rank == 3:
        alone = dist.new_group([0, 3], timeout=datetime.timedelta(seconds=60), use_local_synchronization=True)
    if rank in (0, 3):
        assert total(alone) == 3.0
        tensor = torch.tensor([float(rank), 1.0])
        dist.all_reduce(tensor, group=alone)
        assert tensor.tolist() == [3.0, 2.0]
    dist.barrier()


def check_abort_during_the_wait_for_members() -> None:
    """It ends the wait of all threads that wait for the members, and later operations say so, too."""
    errors: list[str] = []

    def begin(group: Any) -> None:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            errors.append(str(error))

    if rank == 0:
        group = dist.new_group([0, 1, 3], timeout=datetime.timedelta(seconds=100), use_local_synchronization=True)
        second = dist.new_group([0, 1, 3], timeout=datetime.timedelta(seconds=1), use_local_synchronization=True)
        threads = [threading.Thread(target=begin, args=[group], daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        begun = time.monotonic()
        begin(second)  # it waits for the same members, and no longer than its own timeout
        assert "[0, 1, 3] have not made their group within" in errors.pop(0), errors
        assert time.monotonic() - begun < 20
        group.abort()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        begin(group)
        assert len(errors) == 3, errors
        assert all("is aborted by this rank" in text for text in errors), errors
    dist.barrier()
    if rank in (1, 3):
        group = dist.new_group([0, 1, 3], use_local_synchronization=True)
        second = dist.new_group([0, 1, 3], use_local_synchronization=True)
    if rank in (0, 1, 3):
        backend = group_of(second)
        assert backend is not None
        backend.set_timeout(datetime.timedelta(seconds=60))
        assert total(second) == 4.0
    dist.barrier()


def check_operations_of_others() -> None:
    """As on every backend, an operation on a group that this rank is not in warns and does nothing."""
    group, tensor = dist.new_group([0, 1]), torch.full((1,), 5.0)
    if rank < 2:
        assert total(group) == 1.0
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert dist.all_reduce(tensor, group=group) is None
    assert any("does not belong to the given group" in str(each.message) for each in caught), caught
    assert tensor.item() == 5.0
    assert dist.get_rank(group) == -1


def check_unsorted_group() -> None:
    """The ranks of a group need not be in the order of those of the job."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        return  # this PyTorch sorts them
    order = [2, 0, 3, 1]
    group = dist.new_group(order, sort_ranks=False)
    here, mine = order.index(rank), torch.tensor([float(rank)])
    assert dist.get_rank(group) == here
    whole = torch.empty(4)
    dist.all_gather_into_tensor(whole, mine, group=group)
    assert whole.tolist() == order
    places = [torch.empty(1) for _ in order]
    dist.all_gather(places, mine, group=group)
    assert [place.item() for place in places] == order
    places = [torch.empty(each + 1) for each in order]  # uneven
    dist.all_gather(places, torch.full((rank + 1,), float(rank)), group=group)
    assert [place.tolist() for place in places] == [[float(each)] * (each + 1) for each in order]
    part = torch.empty(1)
    dist.reduce_scatter_tensor(part, torch.arange(4.0), group=group)
    assert part.item() == 4 * here
    dist.reduce_scatter(part, [torch.tensor([float(each)]) for each in range(4)], group=group)
    assert part.item() == 4 * here
    dist.all_to_all_single(whole, torch.arange(4.0) + 10 * here, group=group)
    assert whole.tolist() == [10.0 * each + here for each in range(4)]
    received = torch.empty(4 * (here + 1))
    sent = torch.cat([torch.full((each + 1,), float(here)) for each in range(4)])
    dist.all_to_all_single(received, sent, [here + 1] * 4, [1, 2, 3, 4], group=group)
    assert received.tolist() == [float(each) for each in range(4) for _ in range(here + 1)]
    dist.scatter(part, [torch.tensor([float(each)]) for each in range(4)] if rank == 3 else None, src=3, group=group)
    assert part.item() == here
    places = [torch.empty(1) for _ in order]
    dist.gather(mine, places if rank == 1 else None, dst=1, group=group)
    assert rank != 1 or [place.item() for place in places] == order
    tensor = mine.clone()
    dist.broadcast(tensor, src=3, group=group)
    assert tensor.item() == 3.0
    with dist._coalescing_manager(group=group):
        wholes = [torch.empty(4) for _ in range(2)]
        for each in wholes:
            dist.all_gather_into_tensor(each, mine, group=group)
    assert [each.tolist() for each in wholes] == [[float(one) for one in order]] * 2
    message = torch.empty(1)
    if rank == order[0]:
        dist.send(mine, group_dst=1, group=group)
    elif rank == order[1]:
        assert dist.recv(message, group=group) == order[0]
        assert message.item() == order[0]


def values(work: Any) -> list[list[float]]:
    """What an operation returns, by itself and by its future."""
    future = work.get_future()
    work.wait()
    results, of_future = ([each.tolist() for each in some] for some in (work.result(), future.value()))
    assert results == of_future, (results, of_future)
    return results


def check_results_of_an_unsorted_group() -> None:
    """Operations return the tensors that they were given, in that order; tensors need not be contiguous."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        return
    order = [2, 0, 3, 1]
    group = dist.new_group(order, sort_ranks=False)
    here, mine, by_order = order.index(rank), torch.tensor([float(rank)]), [[float(each)] for each in order]
    assert values(dist.all_gather([torch.empty(1) for _ in order], mine, group, async_op=True)) == by_order
    received = values(dist.all_to_all([torch.empty(1) for _ in order], list(mine.repeat(4).split(1)), group, True))
    assert received == by_order
    whole = torch.empty(4)
    assert values(dist.all_gather_into_tensor(whole, mine, group, async_op=True)) == [[float(each) for each in order]]
    assert values(dist.all_to_all_single(whole, mine.repeat(4), group=group, async_op=True)) == [
        [float(each) for each in order]
    ]
    places = [torch.empty(1) for _ in order]
    gathered = values(dist.gather(mine, places if here == 1 else None, group_dst=1, group=group, async_op=True))
    assert here != 1 or gathered == by_order
    wide = torch.empty(2, 4).t()  # not contiguous
    dist.all_gather_into_tensor(wide, torch.full((2,), float(rank)), group)
    assert wide.tolist() == [[float(each)] * 2 for each in order]
    dist.all_to_all_single(wide, torch.full((2, 4), float(rank)).t(), group=group)
    assert wide.tolist() == [[float(each)] * 2 for each in order]
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(8.0).reshape(2, 4).t(), group=group)
    assert part.tolist() == [4.0 * here, 4.0 * (here + 4)]
    complex_whole = torch.empty(4, dtype=torch.complex64)
    dist.all_gather_into_tensor(complex_whole, torch.tensor([complex(rank, 1)]), group)
    assert complex_whole.tolist() == [complex(each, 1) for each in order]


def fails(call: Callable[[], Any]) -> bool:
    """Whether a call fails on this rank, but not for its timeout."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert "in flight" not in str(error), error
        return True
    return False


def check_wrong_arguments_in_an_unsorted_group() -> None:
    """Where one rank alone has wrong ones, no rank waits, and the group goes on."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        return
    group = dist.new_group([2, 0, 3, 1], sort_ranks=False)
    more = int(rank == 3)
    mine, part = torch.ones(2), torch.empty(2)
    assert fails(lambda: dist.all_gather_into_tensor(torch.empty(8 + more), mine, group)) == (rank == 3)
    assert total(group) == 6.0
    assert fails(lambda: dist.reduce_scatter_tensor(part, torch.ones(8 + more), group=group))
    assert total(group) == 6.0
    assert fails(lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), None, [1, 1, 1, 1 + more], group))
    assert total(group) == 6.0
    with_other = [torch.ones(2) for _ in range(3)] + [torch.ones(2, dtype=torch.float64 if more else torch.float32)]
    assert fails(lambda: group.reduce_scatter([part], [with_other]).wait())  # PyTorch's function would refuse it
    assert total(group) == 6.0


def check_split_and_shrink() -> None:
    """Groups that are made of other groups, where PyTorch can call such a backend."""
    if not CAN_EXTEND_BACKEND:
        return
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert total(half) == (1.0 if rank < 2 else 5.0)
    twice = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert total(twice) == (1.0 if rank < 2 else 5.0)
    one = dist.split_group(half, split_ranks=[[0], [1]])
    assert total(one) == rank
    whole = dist.new_group(list(range(4)))
    if rank < 3:
        left = dist.shrink_group([3], whole)
        assert dist.get_world_size(left) == 3
        assert total(left) == 3.0
    try:
        dist.split_group(half, split_ranks=[[5]])
    except (ValueError, RuntimeError):
        pass
    else:
        raise AssertionError("there is no rank 5")


def check_mesh_without_hints() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert total(mesh["replicate"].get_group()) == 2 * (rank % 2) + 2
    assert total(mesh["shard"].get_group()) == 4 * (rank // 2) + 1
    flat = mesh["replicate", "shard"]._flatten("all")
    assert total(flat.get_group()) == 6.0


def check_hints() -> None:
    """They are not necessary and do no harm, on some ranks only or twice."""
    if rank < 2:
        ronde.torch.distributed.register_groups([[0, 1], [2, 3]])
        ronde.torch.distributed.register_groups([[0, 1]])
    ronde.torch.distributed.register_mesh((2, 2))
    for wrong in ([0, 9], [1, 1]):
        try:
            ronde.torch.distributed.register_groups([wrong])
        except ValueError as error:
            assert "ranks of this job are 0 to 3" in str(error), error
        else:
            raise AssertionError(wrong)
    group = ronde.torch.distributed.new_group([3, 2])
    assert rank < 2 or total(group) == 5.0


def check_destroy_of_one() -> None:
    group = dist.new_group([0, 1, 2, 3])
    assert total(group) == 6.0
    dist.destroy_process_group(group)
    group = dist.new_group([0, 1, 2, 3])
    assert total(group) == 6.0


def check_abort() -> None:
    """Operations in flight fail on all ranks, and other groups go on."""
    group = dist.new_group([0, 1, 2, 3])
    assert total(group) == 6.0
    if rank > 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        group.abort()
        try:
            work.wait()
        except RuntimeError as error:
            assert "is aborted" in str(error) or "withdr" in str(error) or "gave up" in str(error), error
        else:
            raise AssertionError("rank 0 has not called it")
    dist.barrier()


dist.init_process_group("ronde", **({"init_method": "ronde://"} if sys.argv[1:2] == ["ronde"] else {}))
rank = dist.get_rank()
assert dist.get_world_size() == 4
assert group_of(dist.group.WORLD) is not None
for check in (
    check_plain_groups,
    check_messages_of_groups_with_the_same_ranks,
    check_groups_of_their_members_alone,
    check_a_group_that_others_do_not_make,
    check_abort_during_the_wait_for_members,
    check_operations_of_others,
    check_unsorted_group,
    check_results_of_an_unsorted_group,
    check_wrong_arguments_in_an_unsorted_group,
    check_split_and_shrink,
    check_mesh_without_hints,
    check_hints,
    check_destroy_of_one,
    check_abort,
):
    if not sys.argv[2:] or check.__name__ in sys.argv[2:]:
        check()
dist.destroy_process_group()
dist.init_process_group("cpu:ronde")
assert total(None) == 6.0
dist.destroy_process_group()
print("all groups are right")
