"""Messages between two ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.submission import read_nothing
from ronde.torch.distributed.base import GroupBase
from ronde.torch.distributed.elements import input_of, read_into

if TYPE_CHECKING:
    import datetime
    from collections.abc import Sequence

    import torch

    from ronde.torch.distributed.work import Operation


class Messages(GroupBase):
    """Messages of a group, with the names and arguments of PyTorch's `Backend`. Ranks are those within the group."""

    def send(
        self, tensors: Sequence[torch.Tensor], to_rank: int, tag: int = 0, timeout: datetime.timedelta | None = None
    ) -> Operation:
        """Sends a tensor to another rank."""
        (tensor,) = tensors
        start = self._ranks.message("send", input_of(tensor), read_nothing, to_rank, tag)
        return self._begin_message(f"send to rank {to_rank}", start, tensor, timeout)

    def recv(
        self, tensors: Sequence[torch.Tensor], from_rank: int, tag: int = 0, timeout: datetime.timedelta | None = None
    ) -> Operation:
        """Overwrites a tensor with one that another rank sends."""
        (tensor,) = tensors
        start = self._ranks.message("recv", None, read_into(tensor, f"rank {from_rank}"), from_rank, tag)
        return self._begin_message(f"receive from rank {from_rank}", start, tensor, timeout)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Operation:
        """Overwrites a tensor with the first one that any other rank sends."""
        (tensor,), ranks = tensors, self._ranks
        read_message = read_into(tensor)

        def read(operation: Any) -> int:
            source = ranks.index_of(operation.source())
            read_message(operation)
            return source

        start = self._ranks.request("recv", read, any_source=True, tag=ranks.tag(tag))
        return self._begin_message("receive from any rank", start, tensor, None)
