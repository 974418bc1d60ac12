"""Helpers of horovod.ray that need no cluster."""

from __future__ import annotations


def test_the_coordinator_numbers_the_hosts_that_have_a_local_rank() -> None:
    from horovod.ray.runner import Coordinator, MiniSettings

    coordinator = Coordinator(MiniSettings())
    for rank, host in enumerate(["a", "b", "b"]):
        coordinator.register(host, host, rank)
    found = coordinator.finalize_registration()
    numbers = [[found[rank][f"HOROVOD_{name}"] for name in ("CROSS_RANK", "CROSS_SIZE")] for rank in range(3)]
    assert numbers == [[0, 2], [1, 2], [0, 1]]
