"""A process of a compute job: `ronde run -np N python -m ronde.tensorflow.data.compute_worker FILE`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import secrets
import socket
from typing import TYPE_CHECKING, Any

import numpy

from ronde import without_launcher
from ronde.client import connect
from ronde.data.compute_registry import ComputeService
from ronde.tensorflow.data.compute_service import SIDES, TfDataServiceConfig, compute_worker_fn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def main(
    dispatchers: int,
    dispatcher_side: str,
    configfile: str | os.PathLike[str],
    timeout: float = 60,
    plaintext_network: bool = False,
) -> None:
    """Runs this rank's worker, and rank 0 the registry, until a training job calls `shutdown` of the compute client.

    dispatchers       -- the number of dispatchers, which the workers share evenly
    dispatcher_side   -- where they run: "compute" or "training"
    configfile        -- the file that rank 0 writes for training jobs
    timeout           -- how long to wait for registrations, in seconds
    plaintext_network -- whether servers accept connections of other hosts, without encryption and authentication

    Raises ValueError if the ranks cannot be divided evenly among the dispatchers, and if they are on several hosts
    without `plaintext_network`.
    """
    client = connect(**without_launcher.settings_without_launcher({}))
    service = None
    try:
        rank, size = client.rank, client.size
        if dispatchers < 1 or size % dispatchers:
            raise ValueError(
                f"Number of processes ({size}) must be a multiple of number of dispatchers ({dispatchers})."
            )
        _check_hosts(client, plaintext_network)
        config = None
        if rank == 0:
            key = secrets.token_bytes(32)
            host = "" if plaintext_network else "127.0.0.1"
            service = ComputeService(dispatchers, size // dispatchers, key, host=host)
            address = f"{socket.gethostname() if plaintext_network else '127.0.0.1'}:{service.port}"
            each = size // dispatchers
            config = TfDataServiceConfig(dispatchers, each, dispatcher_side, [address], key, timeout, plaintext_network)
        found = _of_rank_zero(client, config)
        if rank == 0:
            found.write(configfile)
        compute_worker_fn(found, rank)
        client.barrier()
    finally:
        if service is not None:
            service.close()
        client.close()


def _check_hosts(client: Client, plaintext_network: bool) -> None:
    """Raises ValueError on all ranks if they are on several hosts, whose servers would refuse each other."""
    boot = _BOOT_ID.read_bytes() if _BOOT_ID.exists() else os.uname().nodename.encode()
    digest = numpy.frombuffer(hashlib.sha256(boot).digest(), numpy.uint8).reshape(1, -1)
    digests = client.allgather(digest, name="compute_worker.hosts")
    if not plaintext_network and (digests != digests[0]).any():
        raise ValueError(
            "the compute workers are on several hosts, and servers of tf.data have neither encryption nor "
            "authentication. Start them on one host, or with --plaintext-network if anybody on the network may read "
            "the batches and run datasets on the workers (docs/DATA.md)"
        )


def _of_rank_zero(client: Client, config: TfDataServiceConfig | None) -> TfDataServiceConfig:
    """Sends the configuration of rank 0 to all ranks, over ronde's encrypted links."""
    text = b"" if config is None else json.dumps(config.to_dict()).encode()
    length = client.broadcast(numpy.array([len(text)], numpy.int64), 0, name="compute_worker.length")
    bytes_of_text = numpy.zeros(int(length[0]), numpy.uint8)
    if config is not None:
        bytes_of_text[:] = numpy.frombuffer(text, numpy.uint8)
    received = client.broadcast(bytes_of_text, 0, name="compute_worker.config")
    return TfDataServiceConfig.from_dict(json.loads(received.tobytes()))


def command_line(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parses the command line into the arguments of `main`."""
    parser = argparse.ArgumentParser(description="Runs a worker of tf.data's service, as a rank of a compute job.")
    parser.add_argument("configfile", help="the file that rank 0 writes, by which training jobs find the compute job")
    parser.add_argument("--dispatchers", type=int, default=1, help="the number of dispatchers (default: 1)")
    parser.add_argument(
        "--dispatcher-side",
        choices=SIDES,
        default="compute",
        help="the job in which dispatchers run (default: compute)",
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for registrations (default: 60)")
    parser.add_argument(
        "--plaintext-network",
        action="store_true",
        help="accept connections of other hosts: anybody on the network can read the batches and run datasets here",
    )
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    main(**command_line())
