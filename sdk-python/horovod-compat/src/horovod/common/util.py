"""Small things that scripts take from here."""

from __future__ import annotations

import importlib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Item = TypeVar("Item")
EXTENSIONS = ["torch"]


def check_extension(ext_name: str, *_: Any, **__: Any) -> None:
    """Does nothing for `horovod.torch`, which needs no native library of its own; raises ImportError for others."""
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(f"{ext_name} is not there: horovod-compat answers for PyTorch only (horovod.torch)")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the module for a framework can be imported: "torch" or no other.

    verbose -- prints why not
    """
    if ext_base_name not in EXTENSIONS:
        return False
    try:
        importlib.import_module(f"horovod.{ext_base_name}")
    except ImportError as error:
        if verbose:
            print(f"horovod.{ext_base_name} cannot be imported: {error}")
        return False
    return True


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework sees a GPU."""
    if not extension_available(ext_base_name, verbose):
        return False
    import torch

    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether the number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """The items in so many parts, in their order, of sizes that differ by one at most; the longer ones come first."""
    length, longer = divmod(len(items), num_parts)
    starts = [part * length + min(part, longer) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in zip(starts, starts[1:])]


def is_iterable(value: Any) -> bool:
    """Whether `iter` takes it."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets variables of the environment, or with None takes them away, for as long as the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
