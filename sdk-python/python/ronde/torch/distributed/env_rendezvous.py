"""`env://`, PyTorch's default rendezvous, in jobs of ronde: no store is opened before one is used.

The backend "ronde" uses none. Groups of other backends beside it need one, which rank 0 of the job serves, even where
it is not their member. So each rank opens it when it makes such a group (`open_for`).
"""

from __future__ import annotations

import functools
import inspect
import os
import urllib.parse
from typing import TYPE_CHECKING, Any, Callable

import torch.distributed
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

import ronde_entry_points
from ronde.torch.distributed.lazy_store import LazyStore

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterator, Mapping

Handler = Callable[..., "Iterator[tuple[Store, int, int]]"]


def init_process_group(timeout: datetime.timedelta) -> None:
    """Makes the default group over ronde for the ranks of this job. Raises what `init_process_group("ronde")` does."""
    torch.distributed.init_process_group(ronde_entry_points.BACKEND, init_method="ronde://", timeout=timeout)


def numbers(url: str, environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Returns rank and size of `env://`: those in the URL, else RANK and WORLD_SIZE; None for one that is not given.

    Raises ValueError for one that is not a number.
    """
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
    return (
        _number("RANK", query.get("rank") or environment.get("RANK")),
        _number("WORLD_SIZE", query.get("world_size") or environment.get("WORLD_SIZE")),
    )


def _number(name: str, text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}, but must be a number: unset it to use that of the job of ronde")
    return int(text)


def rendezvous(url: str, options: dict[str, Any]) -> Iterator[tuple[Store, int, int]]:
    """Does what PyTorch's handler of `env://` does, but opens no store yet.

    options -- its keyword arguments

    Rank and size are the job's where neither the URL nor RANK and WORLD_SIZE give them: the scripts for Slurm,
    Kubernetes and compose set none. Raises what `ronde.torch.init` does, which is called then.
    """
    rank, size = numbers(url, os.environ)
    if rank is None or size is None:
        from ronde.torch.distributed import creation

        client = creation.begun({}).client
        rank, size = client.rank if rank is None else rank, client.size if size is None else size
    yield store(rank, size, url, **options), rank, size
    raise RuntimeError("env:// gives no second rendezvous")


def store(
    rank: int, size: int, url: str = "env://", timeout: datetime.timedelta = default_pg_timeout, **unused: Any
) -> Store:
    """Returns a store for all ranks that is opened by its first use, or by a group of another backend.

    url     -- with the options of `env://`
    timeout -- of the connection to it
    unused  -- other options of rendezvous, which PyTorch's handler does not use either
    """
    del unused
    if size == 1:
        return HashStore()
    _install()
    return LazyStore(lambda: _opened(rank, size, url, timeout))


def _opened(rank: int, size: int, url: str, timeout: datetime.timedelta) -> Store:
    """Opens the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves, or torchrun.

    PyTorch's handler waits on rank 0 for all ranks, some of which may never use the store; this does not.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise RuntimeError(
            "a group of another backend than ronde, or the program, uses the store of torch.distributed, but "
            "MASTER_ADDR and MASTER_PORT are not set. Set them to the host of rank 0 and a free port there, or use the "
            'backend "ronde" for all groups'
        )
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
    is_old = (query.get("use_libuv") or os.environ.get("USE_LIBUV")) == "0"
    options = {"use_libuv": False} if is_old else {}
    try:
        return TCPStore(
            address, int(port), size, serves, timeout, wait_for_workers=False, multi_tenant=serves, **options
        )
    except Exception as error:
        raise RuntimeError(
            f"the store of torch.distributed at {address}:{port} (MASTER_ADDR, MASTER_PORT) cannot be opened by rank "
            f"{rank}: {error}. Rank 0 opens it when it calls new_group for a group of another backend than ronde; it "
            "must call it, too, with use_local_synchronization=True"
        ) from error


def _default_store() -> LazyStore | None:
    """Returns the store of the default group if this module made it."""
    group = c10d.GroupMember.WORLD
    found: Any = None if group is None else c10d._world.pg_map.get(group, (None, None))[1]
    while isinstance(found, PrefixStore):
        found = found.underlying_store
    return found if isinstance(found, LazyStore) else None


def open_for(backend: Any) -> None:
    """Opens the default group's store if a group of this backend uses it. Raises RuntimeError if it cannot be opened.

    backend -- as `new_group` takes it; None for that of the default group
    """
    if backend is None:
        backend = torch.distributed.get_backend_config()
    found = _default_store() if ronde_entry_points.is_other(backend) else None
    if found is not None:
        found.open()


@functools.cache
def _install() -> None:
    """Wraps what all ranks call for each new group, and what releases the default one. Both are PyTorch's own."""
    make, update = c10d._new_group_with_tag, c10d._update_default_pg
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*arguments: Any, **settings: Any) -> Any:
        if torch.distributed.is_initialized():
            open_for(signature.bind(*arguments, **settings).arguments.get("backend"))
        return make(*arguments, **settings)

    @functools.wraps(update)
    def updated(pg: Any) -> None:
        # While the default group that ends is still known.
        ended = _default_store() if pg is None else None
        update(pg)
        if ended is not None:
            ended.release()

    c10d._new_group_with_tag = made
    c10d._update_default_pg = updated
