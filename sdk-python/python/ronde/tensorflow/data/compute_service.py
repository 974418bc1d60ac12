"""tf.data's service for training jobs: processes that compute batches, and how training finds them.

A compute job runs tf.data's own dispatchers and workers. Their protocol is gRPC without encryption or authentication,
and a worker computes any dataset that it is sent, with the rights of its user. So they accept connections from their
own host only, unless the compute job is started with `--plaintext-network`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ronde.data.compute_registry import ComputeClient
from ronde.tensorflow.data.loopback import accept_loopback_only

if TYPE_CHECKING:
    from collections.abc import Iterator

SIDES = ("compute", "training")
_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """How training jobs reach a compute job.

    dispatchers            -- the number of dispatchers
    workers_per_dispatcher -- the number of workers of each
    dispatcher_side        -- where dispatchers run: "compute", in the compute job, or "training", in the training job
    addresses              -- host and port of the registry, as a list of texts
    key                    -- the secret of the compute job
    timeout                -- how long to wait for registrations, in seconds
    plaintext_network      -- whether servers accept connections of other hosts
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Any
    key: bytes
    timeout: float = 60
    plaintext_network: bool = False

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ValueError(f'dispatcher_side is {self.dispatcher_side!r}; give "compute" or "training"')

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Returns a client of the registry."""
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as values of JSON, the key in base64."""
        return {**dataclasses.asdict(self), "key": base64.b64encode(self.key).decode("ascii")}

    @staticmethod
    def from_dict(config: dict[str, Any]) -> TfDataServiceConfig:
        """Returns the configuration of a dictionary of `to_dict`. Raises ValueError if it is none."""
        names = {field.name for field in dataclasses.fields(TfDataServiceConfig)}
        try:
            values = {name: value for name, value in config.items() if name in names}
            return TfDataServiceConfig(**{**values, "key": base64.b64decode(config["key"], validate=True)})
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no configuration of a compute job: {error}") from error

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Writes the configuration into a file that only this user can read: it contains the key."""
        path = pathlib.Path(filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Readers that wait for the file see it complete or not at all.
        new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file)
        new.replace(path)

    @staticmethod
    def read(filename: str | os.PathLike[str], wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Returns the configuration in a file.

        wait_for_file_creation -- whether to wait, without limit, until the file is there

        Raises FileNotFoundError if there is none, PermissionError for another user's file, and ValueError for another
        content.
        """
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(_POLL_S)
        with open(filename, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
                raise PermissionError(f"{filename} belongs to another user, or others can write it; nothing was read")
            return TfDataServiceConfig.from_dict(json.load(file))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Returns a context with the address of this rank's dispatcher, once all its workers have registered.

    With dispatchers on the training side, the first ranks run one each, until the context ends.

    Raises TimeoutException after `compute_config.timeout`, and ConnectionError if the compute job is gone.
    """
    compute = compute_config.compute_client(verbose=2)
    number = rank % compute_config.dispatchers
    server = None
    try:
        if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
            server = dispatch_server(compute_config)
            compute.register_dispatcher(number, dispatcher_address(server, compute_config))
        address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
        compute.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        yield address
    finally:
        if server is not None:
            server._stop()
            server.join()


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Returns a dataset whose elements the compute job computes. It is also a method of `tf.data.Dataset`.

    dataset         -- what the workers compute; the same on all ranks that share a dispatcher
    rank, size      -- this process's number, and with `round_robin` the number of all processes
    processing_mode -- "distributed_epoch": each element comes once in all; "parallel_epochs": once from each worker
    reuse_dataset   -- whether ranks of the same dispatcher share one pass over the dataset
    round_robin     -- with `reuse_dataset`: whether the ranks of a dispatcher, n of them, each get every n-th element

    Raises RuntimeError with dispatchers on the training side, whose servers would end with this call: use
    `tf_data_service`; ValueError for `round_robin` without `reuse_dataset` or size; and what `tf_data_service` does.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "training side dispatcher not supported, use tf_data_service as a context around the training instead"
        )
    if round_robin and (size is None or not reuse_dataset):
        raise ValueError("round_robin shares one pass among the ranks: give size and reuse_dataset=True, too")
    consumer: tuple[int | None, int | None] = (None, None)
    if round_robin and size is not None:
        consumer = consumer_of(rank, size, compute_config.dispatchers)
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=consumer[0],
                num_consumers=consumer[1],
            )
        )


def consumer_of(rank: int, size: int, dispatchers: int) -> tuple[int, int]:
    """Returns a rank's number among the ranks of its dispatcher, from 0, and how many these are.

    A dispatcher hands out elements only once it has all consumers that it expects, so it must expect its own alone.
    """
    return rank // dispatchers, len(range(rank % dispatchers, size, dispatchers))


def compute_worker_fn(compute_config: TfDataServiceConfig, rank: int | None = None) -> None:
    """Runs one worker, and a dispatcher if there is one for this rank, until the compute job is shut down.

    rank -- this process's number in the compute job; default: that of `ronde.tensorflow`

    Raises TimeoutException if the dispatcher does not register in time, and ConnectionError if the registry is gone.
    """
    if rank is None:
        from ronde import tensorflow as hvd

        rank = hvd.rank()
    compute = compute_config.compute_client(verbose=2)
    number = rank % compute_config.dispatchers
    dispatcher = worker = None
    try:
        if compute_config.dispatcher_side == "compute" and rank < compute_config.dispatchers:
            dispatcher = dispatch_server(compute_config)
            compute.register_dispatcher(number, dispatcher_address(dispatcher, compute_config))
        address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
        worker = _worker_server(compute_config, address)
        compute.register_worker_for_dispatcher(number, rank)
        compute.wait_for_shutdown()
    finally:
        for server in (worker, dispatcher):
            if server is not None:
                server._stop()


def dispatch_server(compute_config: TfDataServiceConfig) -> Any:
    """Starts a dispatcher on a free port, restricted to this host unless the configuration says otherwise."""
    service = tf.data.experimental.service
    server = service.DispatchServer(service.DispatcherConfig(port=0, protocol="grpc"))
    _restrict(server, _port(server.target), compute_config)
    return server


def dispatcher_address(server: Any, compute_config: TfDataServiceConfig) -> str:
    """Returns the address of a dispatcher for others."""
    return f"grpc://{_host(compute_config)}:{_port(server.target)}"


def _worker_server(compute_config: TfDataServiceConfig, address: str) -> Any:
    service = tf.data.experimental.service
    # The port is chosen here: restrictions need it, and tf.data does not return it.
    for _ in range(_PORT_ATTEMPTS):
        port = _free_port()
        config = service.WorkerConfig(
            dispatcher_address=address.partition("://")[2],
            worker_address=f"{_host(compute_config)}:{port}",
            port=port,
            protocol="grpc",
        )
        server = service.WorkerServer(config, start=False)
        try:
            server.start()
        except (RuntimeError, tf.errors.OpError) as error:
            failure = error
            continue
        _restrict(server, port, compute_config)
        return server
    raise failure


def _restrict(server: Any, port: int, compute_config: TfDataServiceConfig) -> None:
    if compute_config.plaintext_network:
        return
    try:
        accept_loopback_only(port)
    except BaseException:
        server._stop()
        raise


def _host(compute_config: TfDataServiceConfig) -> str:
    return socket.gethostname() if compute_config.plaintext_network else "localhost"


def _port(target: str) -> int:
    return int(target.rsplit(":", 1)[1])


def _free_port() -> int:
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


_PORT_ATTEMPTS = 5
tf.data.Dataset.send_to_data_service = send_to_data_service
