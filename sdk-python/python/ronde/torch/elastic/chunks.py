"""The tensors of a state as chunks of bytes, which are hashed and sent one by one."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Large enough that its announcement costs little, small enough that several sources take turns in a small state.
CHUNK_BYTES = 4 << 20
DIGEST_BYTES = hashlib.sha256().digest_size
# A chunk has 1024 such rows: its sums are a small part of it.
_ROW_WORDS = 512
_WORD_BYTES = 8


class Part:
    """A tensor of a state.

    name      -- identifies it on all ranks
    tensor    -- dense, of any type that has bytes, on any device
    is_buffer -- whether it is a buffer of a module, such as a running mean, which ranks may compute each for itself
    """

    def __init__(self, name: str, tensor: torch.Tensor, is_buffer: bool = False) -> None:
        self.name, self.is_buffer = name, is_buffer
        self._tensor = tensor.detach()
        self._copy: torch.Tensor | None = None
        self._is_written = False
        self.nbytes = tensor.numel() * tensor.element_size()

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """Returns some bytes in the order of the indices, as uint8 in one dimension: a view on the tensor's device."""
        return self._flat()[begin:end]

    def write(self, begin: int, content: torch.Tensor) -> None:
        """Replaces bytes."""
        target = self._flat()[begin : begin + content.numel()]
        if target.device.type == "cpu":
            numpy.copyto(target.numpy(), content.numpy())
        else:
            target.copy_(content)
        self._is_written = True

    def release(self) -> None:
        """Ends the use of a copy, which a tensor needs that is not contiguous: what was written reaches the tensor."""
        if self._copy is not None and self._is_written:
            self._tensor.copy_(self._copy)
        self._copy, self._is_written = None, False

    def _flat(self) -> torch.Tensor:
        if self._tensor.is_contiguous():
            return self._tensor.view(-1).view(torch.uint8)
        if self._copy is None:
            self._copy = self._tensor.contiguous()
        return self._copy.view(-1).view(torch.uint8)


class Piece(NamedTuple):
    """Some bytes of a part."""

    part: Part
    begin: int
    end: int

    def bytes(self) -> torch.Tensor:
        """Returns them on the CPU, a view if they are there."""
        return self.part.bytes(self.begin, self.end).cpu()

    def release_at_end(self) -> None:
        """Ends the use of the part's copy after its last byte."""
        if self.end == self.part.nbytes:
            self.part.release()


class Chunk:
    """Successive pieces. Chunks of the same parts are the same on all ranks."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.nbytes = 0

    @property
    def is_buffer(self) -> bool:
        """Whether its parts are buffers. Parts of both kinds are never in one chunk."""
        return self.pieces[0].part.is_buffer

    def add(self, piece: Piece) -> None:
        """Appends a piece."""
        self.pieces.append(piece)
        self.nbytes += piece.end - piece.begin

    def read(self) -> torch.Tensor:
        """Returns the bytes on the CPU, as uint8 in one dimension: a view if they are in one tensor there."""
        return self._joined().cpu()

    def digest(self) -> bytes:
        """Returns the digest of the bytes, computed where they are."""
        found = digest_of(self._joined())
        for piece in self.pieces:
            piece.release_at_end()
        return found

    def differing(self, content: torch.Tensor) -> list[str]:
        """Returns the names of the parts that have other bytes than a content, which is as `read` returns it."""
        divided = self._divided(content)
        return [piece.part.name for piece, other in divided if not numpy.array_equal(piece.bytes(), other)]

    def write(self, content: torch.Tensor) -> None:
        """Replaces the bytes by a content."""
        for piece, new in self._divided(content):
            piece.part.write(piece.begin, new)
            piece.release_at_end()

    def _joined(self) -> torch.Tensor:
        found = [piece.part.bytes(piece.begin, piece.end) for piece in self.pieces]
        if len(found) == 1:
            return found[0]
        if len({each.device for each in found}) == 1 and found[0].device.type != "cpu":
            return torch.cat(found)
        return torch.from_numpy(numpy.concatenate([each.cpu().numpy() for each in found]))

    def _divided(self, content: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        return zip(self.pieces, content.split([piece.end - piece.begin for piece in self.pieces]))


def chunks_of(parts: Sequence[Part]) -> list[Chunk]:
    """Returns the chunks of some parts, those of the buffers last. Empty tensors are in none."""
    chunks: list[Chunk] = []
    for is_buffer in (False, True):
        alike = [part for part in parts if part.is_buffer == is_buffer]
        open_chunk: Chunk | None = None
        for piece in _pieces(alike):
            if open_chunk is None or open_chunk.nbytes + piece.end - piece.begin > CHUNK_BYTES:
                open_chunk = Chunk()
                chunks.append(open_chunk)
            open_chunk.add(piece)
    return chunks


def digest_of(content: torch.Tensor) -> bytes:
    """Returns the digest of bytes: the SHA-256 of their number, and of the sums of the rows and columns of 8-byte words
    that they form.

    A change of one to three words always changes a sum, and any other change that is not made for it does, too. Sums
    take a sixth of the time of SHA-256 over all bytes, and run on the GPU where these are.
    """
    row_bytes = _ROW_WORDS * _WORD_BYTES
    missing = -content.numel() % row_bytes
    if missing:
        content = torch.nn.functional.pad(content, (0, missing))
    elif content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    words: Any = content.view(torch.int64).view(-1, _ROW_WORDS)
    if content.device.type == "cpu":
        words = (
            words.numpy()
        )  # whose sums run in this thread: those of PyTorch wait for threads, of which ranks have too many
    sums = [words.sum(0), words.sum(1)]
    made = hashlib.sha256(str(content.numel() - missing).encode())
    for each in sums:
        made.update(each.data if isinstance(each, numpy.ndarray) else each.cpu().numpy().data)
    return made.digest()


def _pieces(parts: Sequence[Part]) -> Iterator[Piece]:
    for part in parts:
        for begin in range(0, part.nbytes, CHUNK_BYTES):
            yield Piece(part, begin, min(begin + CHUNK_BYTES, part.nbytes))
