"""What `RayExecutor.start` gives to each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Executable(NamedTuple):
    """The class of which each worker makes an object, and its arguments."""

    kind: Callable[..., Any] | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
