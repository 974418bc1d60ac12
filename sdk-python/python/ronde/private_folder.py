"""A folder of this user that no other user can enter, and files in it.

The last part of the folder's path is no link. Owner and mode are checked on its descriptor, and its files are opened
relative to that, so that nobody can put another folder in its place between the check and the use of these files.
Folders above it are not checked: whoever can write to one of them can rename this one, or put another folder of this
user in its place. A path that is passed on and opened again, such as a sidecar's session directory, needs a check of
its own there: `ronde.connect` asks the kernel for the user of the sidecar (`sidecar_uid`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import stat
import tempfile
import threading
from typing import TYPE_CHECKING

from ronde.errors import RondeError

if TYPE_CHECKING:
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

    def duplicate(self) -> int:
        """Returns a further descriptor of the folder, for the caller to close."""
        return os.dup(self._descriptor)

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

    def write_whole(self, name: str, content: bytes) -> None:
        """As `write`, but in one step: no other process sees a part. Raises FileExistsError if there is the file."""
        fresh = f".{name}.{os.getpid()}.{threading.get_ident()}"
        self.write(fresh, content)
        try:
            os.link(fresh, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        finally:
            os.unlink(fresh, dir_fd=self._descriptor)

    def replace(self, name: str, content: bytes) -> None:
        """Writes a file that only this user can read, or replaces it in one step. Raises OSError."""
        fresh = f".{name}.{os.getpid()}.{threading.get_ident()}"
        self.write(fresh, content)
        os.rename(fresh, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)


class DirectoryStore:
    """A key-value store in a private folder, which it makes if it does not exist.

    Its methods raise RondeError with cause "settings" if the path is no private folder of this user, and "connect" if
    its files cannot be written or read.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def set(self, key: str, value: bytes) -> None:
        """Writes a value, or replaces it."""
        try:
            with contextlib.suppress(FileExistsError):
                self._path.mkdir(mode=0o700)
            with self._opened() as folder:
                folder.replace(_file_name(key), value)
        except OSError as error:
            raise self._failed("write", error) from error

    def get(self, key: str) -> bytes:
        """Returns a value. Raises FileNotFoundError if there is none."""
        try:
            with self._opened() as folder:
                return folder.read(_file_name(key))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failed("read", error) from error

    def remove(self) -> None:
        """Removes the folder with its values."""
        shutil.rmtree(self._path, ignore_errors=True)

    def _failed(self, what: str, error: OSError) -> RondeError:
        return RondeError(
            f"cannot {what} in {self._path}, in which the ranks of this host meet: {error}. Set XDG_RUNTIME_DIR or "
            "TMPDIR, for all ranks, to a directory of your own in which there is space",
            "connect",
        )

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


def own_base() -> pathlib.Path:
    """Returns the directory for new private folders: XDG_RUNTIME_DIR if that is one, else that for temporary files.

    Schedulers copy the variable from a login node to hosts where this user has no such directory.
    """
    runtime = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    with contextlib.suppress(OSError):
        status = runtime.stat()
        is_private = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS
        if runtime.is_absolute() and stat.S_ISDIR(status.st_mode) and is_private:
            return runtime
    return pathlib.Path(tempfile.gettempdir())


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
