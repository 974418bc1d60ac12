"""Stores: where estimators keep data sets, checkpoints and logs, on any filesystem that fsspec knows.

    store = Store.create("/shared/experiments")          # a folder that all hosts see: LocalStore
    store = Store.create("hdfs://namenode:8020/user/me")  # HDFSStore
    store = Store.create("dbfs:/experiments")             # DBFSLocalStore
    store = Store.create("s3://bucket/experiments")       # FilesystemStore, with the package s3fs

Layout below the prefix: `intermediate_train_data.N`, `intermediate_val_data.N`, and `runs/RUN_ID/` with the checkpoint
and the folder `logs`. Data sets are numbered and are not overwritten.
"""

from __future__ import annotations

import contextlib
import copy
import os
import posixpath
import re
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Callable, ClassVar

import fsspec
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKPOINT_FILENAME, LOGS_SUBDIR = "checkpoint", "logs"
# What a URL begins with, also one without a host, such as "file:/shared".
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class Store(ABC):
    """The interface of all stores: paths of data sets and runs, and reading and writing of files."""

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Returns the store for a path, whose scheme decides the class.

        prefix_path  -- hdfs://... (HDFSStore), dbfs:/... and /dbfs/... (DBFSLocalStore), file://... and paths without
                        a scheme (LocalStore), and other URLs (FilesystemStore)
        args, kwargs -- further arguments of that class
        """
        return Store.kind_of(prefix_path)(prefix_path, *args, **kwargs)

    @staticmethod
    def kind_of(path: str) -> type[FilesystemStore]:
        """Returns the class that `create` makes for a path."""
        if path.startswith("hdfs:"):
            from ronde.spark.common.hdfs import HDFSStore

            return HDFSStore
        if DBFSLocalStore.matches_dbfs(path):
            return DBFSLocalStore
        if "://" not in path or path.startswith("file:"):
            return LocalStore
        return FilesystemStore

    @abstractmethod
    def is_parquet_dataset(self, path: str) -> bool:
        """Returns whether a path is the root of a Parquet data set."""

    @abstractmethod
    def get_parquet_dataset(self, path: str) -> Any:
        """Returns the `pyarrow.parquet.ParquetDataset` of a path."""

    @abstractmethod
    def get_train_data_path(self, idx: int | None = None) -> str:
        """Returns the path of training data set `idx`, or the plain path."""

    @abstractmethod
    def get_val_data_path(self, idx: int | None = None) -> str:
        """Returns the path of validation data set `idx`, or the plain path."""

    @abstractmethod
    def get_test_data_path(self, idx: int | None = None) -> str:
        """Returns the path of test data set `idx`, or the plain path."""

    @abstractmethod
    def saving_runs(self) -> bool:
        """Returns whether training writes checkpoints and logs."""

    @abstractmethod
    def get_runs_path(self) -> str:
        """Returns the folder of all runs."""

    @abstractmethod
    def get_run_path(self, run_id: str) -> str:
        """Returns the folder of a run."""

    @abstractmethod
    def get_checkpoint_path(self, run_id: str) -> str:
        """Returns the path of a run's checkpoint."""

    @abstractmethod
    def get_logs_path(self, run_id: str) -> str:
        """Returns the folder of a run's logs."""

    @abstractmethod
    def get_checkpoint_filename(self) -> str:
        """Returns the name of checkpoints in the folder of their run."""

    @abstractmethod
    def get_logs_subdir(self) -> str:
        """Returns the name of the folder of logs in that of their run."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Returns whether a path exists."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Returns the contents of a file."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Writes a file, and the folders above it. Readers never see a part of it."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that is in it. Does nothing if there is none."""

    @abstractmethod
    def arrow_filesystem(self) -> Any:
        """Returns the `pyarrow.fs.FileSystem` that reads this store's data sets."""

    @abstractmethod
    def get_localized_path(self, path: str) -> str:
        """Returns a path as the filesystem knows it: without scheme and host."""

    @abstractmethod
    def get_full_path(self, path: str) -> str:
        """Returns a path as Spark knows it: with its scheme."""

    @abstractmethod
    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Returns a function that copies a local folder, with all that is in it, into the folder of a run."""

    def to_remote(self, run_id: str, dataset_idx: int | None = None) -> RemoteStore:
        """Returns a view of this store for the processes that train."""
        return RemoteStore(self, run_id, dataset_idx)

    def write_text(self, path: str, text: str) -> None:
        """Writes a file of text in UTF-8, as `write` does."""
        self.write(path, text.encode())

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], Any]:
        """Returns a function whose contexts are local folders for the output of a run."""
        return self.to_remote(run_id).get_local_output_dir

    def get_full_path_fn(self) -> Callable[[str], str]:
        """Returns `get_full_path`."""
        return self.get_full_path

    def check_writable(self, data_sets: bool = True) -> None:
        """Writes, reads and removes a file where data sets and, if they are saved, runs are written.

        data_sets -- whether data sets are to be written

        Raises OSError with the path, the reason and what to do if that fails, or if the file has other contents.
        """
        folders = [posixpath.dirname(self.get_train_data_path()), posixpath.dirname(self.get_val_data_path())]
        folders *= data_sets
        folders += [self.get_runs_path()] * self.saving_runs()
        for folder in dict.fromkeys(folders):
            self._check_folder(folder)

    def _check_folder(self, folder: str) -> None:
        name = f".ronde-{uuid.uuid4().hex}"
        probe, failing = posixpath.join(folder, name), "written"
        try:
            self.write(probe, name.encode())
            failing = "read"
            try:
                found = self.read(probe)
            finally:
                self.remove(probe)
            if found != name.encode():
                raise ValueError(f"{probe} has other contents than those that were written")
        except Exception as error:
            raise OSError(
                f"the store cannot be {failing}: {folder!r} ({type(error).__name__}: {error}). Estimators write and "
                "read Parquet files, checkpoints and logs there; give a path that this process and all executors can "
                "write and read, or Store(..., save_runs=False) if it is that of the runs"
            ) from error

    def first_free_index(self, least: int = 0) -> int:
        """Returns the lowest number from `least` on for which there are no training and no validation data."""
        index = least
        while self.exists(self.get_train_data_path(index)) or self.exists(self.get_val_data_path(index)):
            index += 1
        return index

    def next_index(self) -> int:
        """Returns a free number for new data sets, above those of all training data: the highest is the newest."""
        return self.first_free_index(max([-1, *self.train_data_indices()]) + 1)

    def train_data_indices(self) -> list[int]:
        """Returns the numbers of the training data sets, sorted.

        A store that cannot list folders finds those below `first_free_index` only.
        """
        return [index for index in range(self.first_free_index()) if self.exists(self.get_train_data_path(index))]

    def without_credentials(self) -> Any:
        """Returns a copy without options that may contain credentials. Saved estimators have it."""
        copied = copy.copy(self)
        if hasattr(copied, "storage_options"):
            copied.storage_options = {}
        return copied


class RemoteStore:
    """The paths of one run, and its output, for the processes that train.

    store       -- the store
    run_id      -- the run
    dataset_idx -- the number of the data sets; None: the plain paths
    """

    def __init__(self, store: Store, run_id: str, dataset_idx: int | None) -> None:
        self.store, self.run_id = store, run_id
        self.train_data_path = store.get_train_data_path(dataset_idx)
        self.val_data_path = store.get_val_data_path(dataset_idx)
        self.test_data_path = store.get_test_data_path(dataset_idx)
        self.saving_runs = store.saving_runs()
        self.runs_path, self.run_path = store.get_runs_path(), store.get_run_path(run_id)
        self.checkpoint_path, self.logs_path = store.get_checkpoint_path(run_id), store.get_logs_path(run_id)
        self.checkpoint_filename, self.logs_subdir = store.get_checkpoint_filename(), store.get_logs_subdir()

    @contextlib.contextmanager
    def get_local_output_dir(self) -> Iterator[str]:
        """Returns a context with a local folder for the output of a run, which `sync` copies to the store."""
        with tempfile.TemporaryDirectory(prefix="ronde-run-") as folder:
            yield folder

    def sync(self, local_dir: str) -> None:
        """Copies a local folder into that of the run."""
        self.store.sync_fn(self.run_id)(local_dir)


class FilesystemStore(Store):
    """A store on a filesystem of fsspec.

    prefix_path -- a URL such as "s3://bucket/folder", or a local path. Its package (s3fs, gcsfs, adlfs) must be
                   installed on the driver and the executors, and Spark must have its own connector for the same URL
    train_path, val_path, test_path, runs_path -- default: below the prefix
    save_runs   -- whether training writes checkpoints and logs
    storage_options     -- options of fsspec, such as credentials. They travel to the executors with the store
    checkpoint_filename -- default: "checkpoint"
    """

    # fsspec's names for the schemes of Spark's connectors.
    SCHEMES: ClassVar[dict[str, str]] = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "abfs"}

    def __init__(
        self,
        prefix_path: str | None = None,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise TypeError(f"{type(self).__name__} has no argument {', '.join(sorted(kwargs))}")
        if prefix_path is None and train_path is None:
            raise ValueError("a store needs a path: give prefix_path, or train_path and val_path")
        # Where only data sets are named, runs are beside them.
        prefix = prefix_path if prefix_path is not None else posixpath.dirname(str(train_path).rstrip("/"))
        self._scheme = prefix.partition("://")[0] if "://" in prefix else "file"
        self.prefix_path = self.get_full_path(prefix)
        self.storage_options = dict(storage_options or {})
        self._train_path = self._below("intermediate_train_data", train_path)
        self._val_path = self._below("intermediate_val_data", val_path)
        self._test_path = self._below("intermediate_test_data", test_path)
        self._runs_path = self._below("runs", runs_path)
        self._save_runs = save_runs
        self._checkpoint_filename = checkpoint_filename or CHECKPOINT_FILENAME

    @classmethod
    def matches(cls, path: str) -> bool:
        """Returns whether `Store.create` makes this class of store for a path, or the one that it is derived from."""
        kind = next(kind for kind in cls.__mro__ if kind.__module__ == __name__)
        return Store.kind_of(path) is kind

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Returns the paths of the files in the folder of a run whose names end with `suffix`, sorted."""
        folder = self.get_run_path(run_id)
        if not self.exists(folder):
            return []
        listed = self.filesystem().ls(self.get_localized_path(folder), detail=False)
        return sorted(posixpath.join(folder, posixpath.basename(path)) for path in listed if path.endswith(suffix))

    def train_data_indices(self) -> list[int]:
        """Returns the numbers of the training data sets, sorted, from the names in their folder."""
        folder, name = posixpath.split(self.get_localized_path(self._train_path))
        filesystem = self.filesystem()
        filesystem.invalidate_cache()
        if not filesystem.exists(folder):
            return []
        names = [posixpath.basename(path.rstrip("/")) for path in filesystem.ls(folder, detail=False)]
        matches = [re.fullmatch(rf"{re.escape(name)}\.(0|[1-9][0-9]*)", each) for each in names]
        return sorted(int(match[1]) for match in matches if match is not None)

    def _below(self, name: str, given: str | None) -> str:
        return posixpath.join(self.prefix_path, name) if given is None else self.get_full_path(given)

    def filesystem(self) -> Any:
        """Returns fsspec's filesystem of this store; fsspec caches it."""
        return fsspec.core.url_to_fs(self._url(self.prefix_path), **self.storage_options)[0]

    def _url(self, path: str) -> str:
        """A URL with fsspec's name of the scheme. A path without a scheme is one of the local filesystem."""
        scheme, separator, rest = path.partition("://")
        return f"{self.SCHEMES.get(scheme, scheme)}://{rest}" if separator else path

    def arrow_filesystem(self) -> Any:
        """Returns fsspec's filesystem for pyarrow."""
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(self.filesystem()))

    def get_full_path(self, path: str) -> str:
        """Returns a URL itself, and any other path with the scheme of `prefix_path`.

        Without one there, a path is local. It becomes absolute, with "file://", because Spark has another default.
        """
        if _SCHEME.match(path):
            return path.rstrip("/")
        if self._scheme == "file":
            return "file://" + os.path.abspath(path)
        return f"{self._scheme}://{path.rstrip('/')}"

    def get_localized_path(self, path: str) -> str:
        """Returns a path as fsspec names it, without its scheme. Its filesystem's package must be installed."""
        if "://" not in path:
            return path
        localized: str = fsspec.core.url_to_fs(self._url(path), **self.storage_options)[1]
        return localized

    def exists(self, path: str) -> bool:
        """Returns whether a path exists. Listings of earlier calls are not used."""
        filesystem = self.filesystem()
        filesystem.invalidate_cache()
        return bool(filesystem.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        """Returns the contents of a file. Raises FileNotFoundError."""
        content: bytes = self.filesystem().cat_file(self.get_localized_path(path))
        return content

    def write(self, path: str, content: bytes) -> None:
        """Writes a file under another name and renames it."""
        filesystem, target = self.filesystem(), self.get_localized_path(path)
        filesystem.makedirs(posixpath.dirname(target), exist_ok=True)
        partial = f"{target}.{uuid.uuid4().hex}.partial"
        filesystem.pipe_file(partial, content)
        filesystem.mv(partial, target)

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that is in it."""
        if self.exists(path):
            self.filesystem().rm(self.get_localized_path(path), recursive=True)

    def is_parquet_dataset(self, path: str) -> bool:
        """Returns whether there are Parquet files at a path."""
        if not self.exists(path):
            return False
        try:
            found = pyarrow.dataset.dataset(
                self.get_localized_path(path), filesystem=self.arrow_filesystem(), format="parquet"
            )
        except pyarrow.ArrowInvalid:
            return False
        return bool(found.files)

    def get_parquet_dataset(self, path: str) -> Any:
        """Returns the `pyarrow.parquet.ParquetDataset` of a path."""
        return pyarrow.parquet.ParquetDataset(self.get_localized_path(path), filesystem=self.arrow_filesystem())

    def get_train_data_path(self, idx: int | None = None) -> str:
        """Returns `train_path`, and `.idx` if that is given."""
        return self._train_path if idx is None else f"{self._train_path}.{idx}"

    def get_val_data_path(self, idx: int | None = None) -> str:
        """Returns `val_path`, and `.idx` if that is given."""
        return self._val_path if idx is None else f"{self._val_path}.{idx}"

    def get_test_data_path(self, idx: int | None = None) -> str:
        """Returns `test_path`, and `.idx` if that is given."""
        return self._test_path if idx is None else f"{self._test_path}.{idx}"

    def saving_runs(self) -> bool:
        """Returns `save_runs`."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Returns the folder of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Returns the folder of a run. Raises ValueError for an ID that is no name of a folder."""
        if not run_id or "/" in run_id or run_id in (".", ".."):
            raise ValueError(f"run_id is {run_id!r}; it names a folder, so it is not empty and has no '/'")
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """Returns the path of a run's checkpoint."""
        return posixpath.join(self.get_run_path(run_id), self._checkpoint_filename)

    def get_logs_path(self, run_id: str) -> str:
        """Returns the folder of a run's logs."""
        return posixpath.join(self.get_run_path(run_id), LOGS_SUBDIR)

    def get_checkpoint_filename(self) -> str:
        """Returns `checkpoint_filename`."""
        return self._checkpoint_filename

    def get_logs_subdir(self) -> str:
        """Returns "logs"."""
        return LOGS_SUBDIR

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Returns a function that copies a local folder into that of a run, file by file."""
        run_path = self.get_run_path(run_id)

        def copy(local_run_path: str) -> None:
            for folder, _, names in os.walk(local_run_path):
                for name in names:
                    source = os.path.join(folder, name)
                    with open(source, "rb") as file:
                        self.write(posixpath.join(run_path, os.path.relpath(source, local_run_path)), file.read())

        return copy


class LocalStore(FilesystemStore):
    """A store in a folder that all hosts see under the same path. On one host any folder will do.

    Its arguments are those of FilesystemStore; paths may begin with "file://".
    """

    def __init__(self, prefix_path: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(prefix_path, *args, **kwargs)

    def arrow_filesystem(self) -> Any:
        """Returns Arrow's own local filesystem."""
        return pyarrow.fs.LocalFileSystem()

    def get_localized_path(self, path: str) -> str:
        """Returns an absolute path without "file://". Raises ValueError for another scheme."""
        if path.startswith("file:"):
            return "/" + path[len("file:") :].lstrip("/")
        if "://" in path:
            raise ValueError(f"{path!r} is no local path; give Store.create a URL")
        return os.path.abspath(path)

    def get_full_path(self, path: str) -> str:
        """Returns the absolute path with "file://", so that Spark does not use its default filesystem."""
        return "file://" + self.get_localized_path(path)

    def write(self, path: str, content: bytes) -> None:
        """Writes a file under another name and renames it."""
        target = self.get_localized_path(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        partial = f"{target}.{uuid.uuid4().hex}.partial"
        try:
            with open(partial, "wb") as file:
                file.write(content)
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that is in it."""
        target = self.get_localized_path(path)
        if os.path.isdir(target) and not os.path.islink(target):
            shutil.rmtree(target)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)


class DBFSLocalStore(LocalStore):
    """A store on Databricks' filesystem by its local mount, for `/dbfs/...`, `dbfs:/...` and `file:///dbfs/...`."""

    @staticmethod
    def matches_dbfs(path: str) -> bool:
        """Returns whether a path is one of these."""
        return path.startswith(("dbfs:/", "/dbfs/", "file:///dbfs/"))

    @staticmethod
    def normalize_path(path: str) -> str:
        """Returns the path in the local mount. Raises ValueError for a path elsewhere."""
        if path.startswith("dbfs:/"):
            return "/dbfs/" + path[len("dbfs:/") :].lstrip("/")
        if path.startswith("file:///dbfs/"):
            return path[len("file://") :]
        if path.startswith("/dbfs/"):
            return path
        raise ValueError(f"{path!r} is no path of DBFS; it begins with /dbfs/, dbfs:/ or file:///dbfs/")

    def get_localized_path(self, path: str) -> str:
        """Returns the path in the local mount."""
        return self.normalize_path(path)
