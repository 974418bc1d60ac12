"""`env://`, PyTorch's default rendezvous, in jobs of `ronde run`: no store is opened before one is used."""

from __future__ import annotations

import os
import urllib.parse
from typing import TYPE_CHECKING, Any, Callable

import torch.distributed
from torch._C._distributed_c10d import Store

from ronde.torch.distributed.lazy_store import LazyStore

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterator, Mapping

Handler = Callable[..., "Iterator[tuple[Store, int, int]]"]

# What `ronde run` sets for its workers, and what PyTorch's handler reads.
_VARIABLES = ("RONDE_JOB", "RONDE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(timeout: datetime.timedelta) -> None:
    """Makes the default group over ronde, by `env://` where a job of `ronde run` is.

    Groups of other backends beside it, which front ends may open, then find a store that all ranks share. Elsewhere
    this is `ronde.torch.distributed.init_process_group`. Raises what that does.
    """
    if all(os.environ.get(name) for name in _VARIABLES):
        torch.distributed.init_process_group("ronde", timeout=timeout)
    else:
        import ronde.torch.distributed

        ronde.torch.distributed.init_process_group(timeout)


def numbers(url: str, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns rank and size of `env://`: those in the URL, else RANK and WORLD_SIZE; None if one is not a number."""
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
    texts = query.get("rank", environment.get("RANK", "")), query.get("world_size", environment.get("WORLD_SIZE", ""))
    if not all(text.isdecimal() for text in texts):
        return None
    return int(texts[0]), int(texts[1])


def rendezvous(plain: Handler, url: str, options: dict[str, Any]) -> Iterator[tuple[Store, int, int]]:
    """Does what PyTorch's handler of `env://` does, but opens no store yet.

    plain   -- PyTorch's handler
    options -- its keyword arguments
    """
    found = numbers(url, os.environ)
    if found is None:
        yield from plain(url, **options)  # which raises and names the variable
        return
    yield LazyStore(lambda: next(plain(url, **options))[0]), *found
    raise RuntimeError("env:// gives no second rendezvous")
