"""The store on HDFS."""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import fsspec

from ronde.spark.common.store import FilesystemStore, RemoteStore

if TYPE_CHECKING:
    from collections.abc import Iterator


class HDFSStore(FilesystemStore):
    """A store on HDFS, by pyarrow's libhdfs. Executors need Hadoop's client: HADOOP_HOME and CLASSPATH.

    prefix_path -- "hdfs://namenode:8020/user/me/folder", "hdfs:///user/me/folder" or "/user/me/folder"
    host, port  -- the name node; default: that of the path, else that of Hadoop's configuration
    user, kerb_ticket, extra_conf -- as for pyarrow's HadoopFileSystem
    driver      -- "libhdfs", the only one that pyarrow has
    temp_dir    -- a local folder for the output of a run before it is copied; default: the system's
    args, kwargs -- as for FilesystemStore

    Raises ValueError for a path of another scheme, and for another driver.
    """

    FS_PREFIX = "hdfs://"

    def __init__(
        self,
        prefix_path: str | None = None,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: dict[str, str] | None = None,
        temp_dir: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            raise ValueError(f"driver is {driver!r}; pyarrow supports 'libhdfs' only")
        self.temp_dir = temp_dir
        super().__init__(prefix_path, *args, **kwargs)
        named = urlsplit(self.prefix_path)
        self.host = host or named.hostname or "default"
        self.port = int(port if port is not None else named.port or 0)
        options = {"user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        self._connection = {name: value for name, value in options.items() if value is not None}

    @staticmethod
    def matches(path: str) -> bool:
        """Returns whether a path has the scheme of HDFS."""
        return path.startswith(HDFSStore.FS_PREFIX)

    def without_credentials(self) -> Any:
        """Returns a copy without `storage_options` and `extra_conf`."""
        copied = super().without_credentials()
        copied._connection = {name: value for name, value in self._connection.items() if name != "extra_conf"}
        return copied

    def filesystem(self) -> Any:
        """Returns fsspec's filesystem, which connects to the name node."""
        return fsspec.filesystem("hdfs", host=self.host, port=self.port, **self._connection, **self.storage_options)

    def get_full_path(self, path: str) -> str:
        """Returns a path with "hdfs://". Raises ValueError for another scheme, and for a relative path."""
        if self.matches(path):
            return path.rstrip("/")
        if "://" in path or not path.startswith("/"):
            raise ValueError(
                f"{path!r} is no path of HDFS; it has the form hdfs://host:port/path, hdfs:///path or /path"
            )
        return self.FS_PREFIX + path.rstrip("/")

    def get_localized_path(self, path: str) -> str:
        """Returns a path without "hdfs://", host and port."""
        return urlsplit(self.get_full_path(path)).path

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> RemoteStore:
        """Returns a view of this store whose local output is in `temp_dir`."""
        return _HdfsRemoteStore(self, run_id, dataset_idx)


class _HdfsRemoteStore(RemoteStore):
    store: HDFSStore

    @contextlib.contextmanager
    def get_local_output_dir(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="ronde-run-", dir=self.store.temp_dir) as folder:
            yield folder
