"""A distributed optimizer's reductions in flight, in the form of Horovod's `_handles`."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from ronde.frameworks import world

if TYPE_CHECKING:
    import torch

    from ronde.torch.reducer import Reducer


class Handles(MutableMapping):  # type: ignore[type-arg]  # Python 3.9 cannot subscript it at run time
    """A mapping from each parameter whose gradient is in flight to (handle, context), as Horovod's `_handles`.

    `synchronize(handle)` waits for that gradient only. Deleting an entry leaves the gradient unchanged; the reduction
    itself continues, because other ranks take part in it. Each member of a group has an entry.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __getitem__(self, parameter: torch.Tensor) -> tuple[int, Any]:
        reduction = self._reducer.in_flight[parameter]
        if reduction.number is None:
            reduction.number = world.handle_of(None, reduction)
        return reduction.number, reduction.context

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        raise TypeError("handles of gradients in flight cannot be replaced; delete them, or assign {} to drop all")

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self._reducer.drop(parameter)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._reducer.in_flight

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(list(self._reducer.in_flight))

    def __len__(self) -> int:
        return len(self._reducer.in_flight)

    def __repr__(self) -> str:
        return repr(dict(self))
