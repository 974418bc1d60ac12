"""A folder of this user that no other user can enter, and files in it.

The folder is opened once, without following links. Owner and mode are checked on the descriptor, and files are opened
relative to it, so that nobody can put another folder in its place between the check and the use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from typing import TYPE_CHECKING

from ronde.errors import RondeError

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

    def replace(self, name: str, content: bytes) -> None:
        """Writes a file that only this user can read, or replaces it in one step. Raises OSError."""
        fresh = f".{name}.{os.getpid()}.{threading.get_ident()}"
        self.write(fresh, content)
        os.rename(fresh, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)


class DirectoryStore:
    """A key-value store in a private folder, which it makes if it does not exist.

    Its methods raise RondeError with cause "settings" if the path is no private folder of this user.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def set(self, key: str, value: bytes) -> None:
        """Writes a value, or replaces it."""
        with contextlib.suppress(FileExistsError):
            self._path.mkdir(mode=0o700)
        with self._opened() as folder:
            folder.replace(_file_name(key), value)

    def get(self, key: str) -> bytes:
        """Returns a value. Raises FileNotFoundError if there is none."""
        with self._opened() as folder:
            return folder.read(_file_name(key))

    def remove(self) -> None:
        """Removes the folder with its values."""
        shutil.rmtree(self._path, ignore_errors=True)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[PrivateFolder]:
        try:
            folder = PrivateFolder(self._path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RondeError(
                f"{self._path} is not a directory of this user alone ({error}), and the ranks of this host would meet "
                "there; remove it, or set XDG_RUNTIME_DIR or TMPDIR to a directory of your own",
                "settings",
            ) from error
        with contextlib.closing(folder):
            yield folder


def _file_name(key: str) -> str:
    return key.replace("/", ".")


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
