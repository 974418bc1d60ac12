"""The native part of ronde: the Rust client. Use the package `ronde` instead."""

from collections.abc import Mapping, Sequence
from typing import final

__version__: str
DTYPES: list[str]

@final
class Session:
    @staticmethod
    def connect(settings: Mapping[str, str], inline: bool, client_name: str) -> Session: ...
    def submit(
        self,
        kind: str,
        dtype: str | None,
        shape: Sequence[int],
        address: int,
        nbytes: int,
        *,
        name: str | None = None,
        op: int = 0,
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        codec: str = "",
        splits: Sequence[int] | None = None,
        tag: int = 0,
        ranks: Sequence[int] = (),
        removed: int = 0,
        set: int = 0,
    ) -> Operation: ...
    def submit_group(
        self,
        kind: str,
        tensors: Sequence[tuple[str, Sequence[int], int, int]],
        *,
        name: str | None = None,
        op: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        codec: str = "",
        set: int = 0,
    ) -> list[Operation]: ...
    def close(self) -> None: ...
    def take_notices(self) -> list[str]: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def epoch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...
    @property
    def cross_rank(self) -> int: ...
    @property
    def cross_size(self) -> int: ...
    @property
    def is_homogeneous(self) -> bool: ...

@final
class Operation:
    @property
    def name(self) -> str: ...
    def poll(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def dtype(self) -> str: ...
    def shape(self) -> list[int]: ...
    def splits(self) -> list[int]: ...
    def last_joined(self) -> int: ...
    def set_id(self) -> int: ...
    def read_into(self, address: int, nbytes: int) -> None: ...
