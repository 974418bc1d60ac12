"""The requests of an elastic job's workers at a rendezvous server: their ranks, and where to notify them."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

from horovod.runner.elastic.worker import GET_RANK_AND_SIZE, PUT_WORKER_ADDRESSES
from horovod.runner.http.http_server import RendezvousHandler

if TYPE_CHECKING:
    from horovod.runner.elastic.driver import ElasticDriver


def create_rendezvous_handler(driver: ElasticDriver) -> type[RendezvousHandler]:
    """Returns the class that answers requests to a `RendezvousServer` for the workers of a driver."""

    class ElasticRendezvousHandler(RendezvousHandler):
        """Answers `rank_and_size` when the next round has begun, and takes `worker_addresses`."""

        def get_value(self, scope: str, key: str) -> bytes | None:
            """Returns the value of a key; for the scope `rank_and_size` that of the slot `host:local rank`."""
            if scope != GET_RANK_AND_SIZE:
                return super().get_value(scope, key)
            host, slot = _slot(key)
            driver.record_ready(host, slot)
            return driver.get_slot_info(host, slot).to_response_string().encode()

        def put_value(self, scope: str, key: str, value: bytes) -> None:
            """Stores the value of a key. In the scope `worker_addresses` it also registers the worker's service."""
            if scope == PUT_WORKER_ADDRESSES:
                content = json.loads(value)
                host, slot = _slot(key)
                driver.register_worker_server(host, slot, content["addresses"], base64.b64decode(content["key"]))
            super().put_value(scope, key, value)

    return ElasticRendezvousHandler


def _slot(key: str) -> tuple[str, int]:
    """Parses `host:local rank`. Raises ValueError for anything else."""
    host, _, slot = key.rpartition(":")
    return host, int(slot)


__all__ = ["GET_RANK_AND_SIZE", "PUT_WORKER_ADDRESSES", "create_rendezvous_handler"]
