"""Trains, as far as data go, with a compute job: tf_data_training.py CONFIGFILE CASE"""

from __future__ import annotations

import socket
import sys
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from horovod.runner.common.service.compute_service import TimeoutException
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, send_to_data_service, tf_data_service

COUNT = 40


def squares() -> Any:
    return tf.data.Dataset.range(COUNT).map(lambda number: number * number)


def everybodys(elements: list[int]) -> list[int]:
    return sorted(hvd.allgather(tf.constant(elements, tf.int64)).numpy().tolist())


def shared(config: TfDataServiceConfig, rank: int, size: int) -> None:
    """The ranks share one pass, and together get each element once."""
    dataset = squares().send_to_data_service(config, rank, size, reuse_dataset=True)
    mine = [int(each) for each in dataset]
    assert everybodys(mine) == [number * number for number in range(COUNT)]
    # Without reuse each rank gets all of them.
    again = sorted(int(each) for each in send_to_data_service(squares(), config, rank, size))
    assert again == [number * number for number in range(COUNT)]
    not_reached_from_other_hosts(config)


def not_reached_from_other_hosts(config: TfDataServiceConfig) -> None:
    target = config.compute_client().wait_for_dispatcher_registration(0, 60)
    port = int(target.rsplit(":", 1)[1])
    with socket.create_connection(("localhost", port), timeout=30):
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))  # sends nothing
        except OSError:
            return
        address = probe.getsockname()[0]
    if not address.startswith("127."):
        with pytest.raises(OSError, match="timed out"):
            socket.create_connection((address, port), timeout=1)


def own(config: TfDataServiceConfig, rank: int, size: int) -> None:
    """Each rank has a dispatcher of its own, on the side of the compute job."""
    assert config.dispatchers == 2
    found = sorted(int(each) for each in squares().send_to_data_service(config, rank, size, reuse_dataset=True))
    assert found == [number * number for number in range(COUNT)]


def training_side(config: TfDataServiceConfig, rank: int, size: int) -> None:
    with pytest.raises(RuntimeError, match="training side dispatcher not supported"):
        squares().send_to_data_service(config, rank, size)
    with tf_data_service(config, rank) as address:
        service = tf.data.experimental.service.distribute("distributed_epoch", service=address, job_name="job")
        mine = [int(each) for each in squares().apply(service)]
        assert everybodys(mine) == [number * number for number in range(COUNT)]
        hvd.barrier()


def round_robin(config: TfDataServiceConfig, rank: int, size: int) -> None:
    for missing in ({"reuse_dataset": True}, {"size": size}):
        with pytest.raises(ValueError, match="round_robin shares one pass"):
            squares().send_to_data_service(config, rank, round_robin=True, **missing)
    endless = tf.data.Dataset.range(1_000_000).repeat()
    dataset = endless.send_to_data_service(
        config, rank, size, processing_mode="parallel_epochs", reuse_dataset=True, round_robin=True
    )
    mine = [int(each) for each in dataset.take(10)]
    # Each compute worker counts from 0, and hands out its elements in turns.
    assert len(mine) == 10
    consumers = size // config.dispatchers
    assert {each % consumers for each in mine} == {rank // config.dispatchers}, mine
    hvd.barrier()
    absent = TfDataServiceConfig(99, 1, "compute", config.addresses, config.key, timeout=0)
    with pytest.raises((IndexError, TimeoutException)), tf_data_service(absent, 98):
        pass


def main(configfile: str, case: str) -> None:
    hvd.init()
    config = TfDataServiceConfig.read(configfile, wait_for_file_creation=True)
    assert TfDataServiceConfig.from_dict(config.to_dict()) == config
    rank, size = hvd.rank(), hvd.size()
    cases = {"shared": shared, "own": own, "training": training_side, "round_robin": round_robin}
    cases[case](config, rank, size)
    hvd.barrier()
    if rank == 0:
        config.compute_client(verbose=2).shutdown()
    print(f"rank {rank} of {size}: {case} passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
