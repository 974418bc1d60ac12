"""A folder of this user that no other user can enter, and files in it.

The folder is opened once, without following links. Owner and mode are checked on the descriptor, and files are opened
relative to it, so that nobody can put another folder in its place between the check and the use.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

# Bits of a mode that give rights to other users.
_OTHERS = 0o077


class PrivateFolder:
    """An open folder.

    Raises OSError if there is no such folder, PermissionError if it belongs to another user or others can enter it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check(self._descriptor, path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._descriptor)

    def read(self, name: str) -> bytes:
        """Returns the content of a file. Raises OSError, and PermissionError for a file that is not private."""
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._descriptor)
        with open(descriptor, "rb") as file:
            _check(descriptor, name)
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Writes a new file that only this user can read. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=self._descriptor), "wb") as file:
            file.write(content)


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[PrivateFolder | None]:
    """Opens a folder for a block; None if it does not exist here or is not private."""
    try:
        folder = PrivateFolder(path)
    except OSError:
        yield None
        return
    with contextlib.closing(folder):
        yield folder


def _check(descriptor: int, name: object) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"{name} belongs to user {status.st_uid} and has mode {mode:o}; it must be private")
