"""The actor that runs an agent of `ronde run` on a node of Ray, and holds the resources of the workers there."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
from typing import TYPE_CHECKING

from ronde.private_folder import PrivateFolder
from ronde.ray.nodes import Place, describe
from ronde.run import CALL

if TYPE_CHECKING:
    from collections.abc import Iterator

# What workers leave in the folder of the call; `ronde.run` describes the first two.
VALUE = "value"
FILES = re.compile(rf"(result|error|{VALUE})\.\d+(\.\d+)?")
_PIECE_BYTES = 1 << 20
_GPUS, _VISIBLE = "gpus", "CUDA_VISIBLE_DEVICES"


def take_gpus(path: str) -> None:
    """Lets this worker see the GPUs that Ray has given to the workers of its node.

    path -- of the folder of the call
    """
    with contextlib.closing(PrivateFolder(pathlib.Path(path))) as folder:
        os.environ[_VISIBLE] = folder.read(f"{_GPUS}.{os.environ['HOROVOD_HOSTNAME']}").decode()


class Agent:
    """Runs a command, and passes its standard input and output on. Ray calls its methods in several threads.

    folder -- the path of the folder in which the workers read the function that they call
    call   -- that function, pickled by the driver
    host   -- the name by which the launcher knows this node
    """

    def __init__(self, folder: str, call: bytes, host: str) -> None:
        self._folder, self._call, self._host = pathlib.Path(folder), call, host
        self._is_own = False
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> Place:
        """Returns where this actor runs."""
        return describe()

    def start(self, command: str) -> None:
        """Starts the command in a shell. Raises OSError if the folder of the call cannot be made here."""
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
            self._is_own = True
        with self._opened() as folder:
            if self._is_own:
                folder.write(CALL, self._call)
            # Workers get the launcher's environment, not that of this process.
            folder.replace(f"{_GPUS}.{self._host}", os.environ.get(_VISIBLE, "").encode())
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(["/bin/sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe)

    def write(self, content: bytes) -> None:
        """Writes to the command's standard input; closes it if there is nothing to write."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which `wait` reports
            if content:
                self._process.stdin.write(content)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def read(self, is_error: bool) -> bytes:
        """Returns what the command writes to standard output or error; waits for it. Nothing at the end."""
        assert self._process is not None
        pipe = self._process.stderr if is_error else self._process.stdout
        assert pipe is not None
        return os.read(pipe.fileno(), _PIECE_BYTES)

    def wait(self) -> int:
        """Returns the command's exit status when it has ended, as a shell does."""
        assert self._process is not None
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def taken(self) -> dict[str, bytes]:
        """Returns the files that workers have left since the last call, unless the driver sees the folder itself."""
        if not self._is_own:
            return {}
        found = {}
        with self._opened() as folder:
            for name in sorted(os.listdir(self._folder)):
                if FILES.fullmatch(name):
                    found[name] = folder.read(name)
                    (self._folder / name).unlink()
        return found

    def remove(self) -> None:
        """Removes the folder, if this made it."""
        if self._is_own:
            for path in self._folder.iterdir():
                path.unlink()
            self._folder.rmdir()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[PrivateFolder]:
        with contextlib.closing(PrivateFolder(self._folder)) as folder:
            yield folder
