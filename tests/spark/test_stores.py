"""Stores on the local filesystem and on one of fsspec, and the paths of those that need a cluster."""

from __future__ import annotations

import io
import pathlib
import pickle

import cloudpickle
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from ronde.spark.common.estimator import HorovodEstimator
from ronde.spark.common.hdfs import HDFSStore
from ronde.spark.common.persistence import restored, stored, without_credentials
from ronde.spark.common.store import DBFSLocalStore, FilesystemStore, LocalStore, Store
from ronde.spark.common.util import check_shape_compatibility, get_simple_meta_from_parquet
from ronde.spark.data import ShardReader
from ronde.spark.torch import TorchModel


def test_the_scheme_decides_the_class(tmp_path: pathlib.Path) -> None:
    for path, kind in [
        (str(tmp_path), LocalStore),
        (f"file://{tmp_path}", LocalStore),
        ("/dbfs/a/b", DBFSLocalStore),
        ("dbfs:/a/b", DBFSLocalStore),
        ("file:///dbfs/a/b", DBFSLocalStore),
        ("hdfs://name:8020/a", HDFSStore),
        ("memory://a/b", FilesystemStore),
        ("s3a://bucket/a", FilesystemStore),
    ]:
        assert type(Store.create(path)) is kind


@pytest.mark.parametrize("url", ["{}", "memory://stores/a"])
def test_files_are_written_whole_and_read_and_removed(tmp_path: pathlib.Path, url: str) -> None:
    store = Store.create(url.format(tmp_path / "new" / "folder"), save_runs=False)
    path = f"{store.prefix_path}/deep/file"
    assert not store.exists(path)
    store.write(path, b"one")
    store.write(path, b"two")
    assert store.exists(path)
    assert store.read(path) == b"two"
    folder = store.get_localized_path(f"{store.prefix_path}/deep")
    filesystem = store.filesystem() if "memory" in url else fsspec.filesystem("file")
    assert [pathlib.PurePath(each).name for each in filesystem.ls(folder, detail=False)] == ["file"]
    store.remove(f"{store.prefix_path}/deep")
    store.remove(f"{store.prefix_path}/deep")
    assert not store.exists(path)
    assert not store.saving_runs()


def test_a_path_without_a_scheme_is_local(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the class that other URLs have, when a program names it instead of `Store.create`."""
    store = FilesystemStore(str(tmp_path / "named"))
    assert store.get_train_data_path(3) == f"file://{tmp_path}/named/intermediate_train_data.3"
    store.check_writable()
    store.write(f"{tmp_path}/named/deep/file", b"one")
    assert (tmp_path / "named" / "deep" / "file").read_bytes() == b"one"
    assert store.read(f"{store.prefix_path}/deep/file") == b"one"
    monkeypatch.chdir(tmp_path)
    relative = FilesystemStore("relative", val_path="beside/")
    assert relative.get_train_data_path(3) == f"file://{pathlib.Path.cwd()}/relative/intermediate_train_data.3"
    assert relative.get_val_data_path(3) == f"file://{pathlib.Path.cwd()}/beside.3"
    assert FilesystemStore("file:/shared/").get_runs_path() == "file:/shared/runs"
    relative.write("relative/file", b"two")
    assert (tmp_path / "relative" / "file").read_bytes() == b"two"


def test_a_path_without_a_scheme_is_where_the_prefix_is() -> None:
    store = FilesystemStore("memory://bucket/prefix", train_path="bucket/train/")
    assert store.get_train_data_path(3) == "memory://bucket/train.3"
    store.write(store.get_train_data_path(3) + "/file", b"three")
    assert fsspec.filesystem("memory").cat("/bucket/train.3/file") == b"three"


def test_the_layout_is_that_of_horovod(tmp_path: pathlib.Path) -> None:
    store = LocalStore(str(tmp_path))
    root = f"file://{tmp_path}"
    assert store.get_train_data_path() == f"{root}/intermediate_train_data"
    assert store.get_train_data_path(3) == f"{root}/intermediate_train_data.3"
    assert store.get_val_data_path(3) == f"{root}/intermediate_val_data.3"
    assert store.get_test_data_path() == f"{root}/intermediate_test_data"
    assert store.get_runs_path() == f"{root}/runs"
    assert store.get_run_path("r") == f"{root}/runs/r"
    assert store.get_checkpoint_path("r") == f"{root}/runs/r/checkpoint"
    assert store.get_logs_path("r") == f"{root}/runs/r/logs"
    assert (store.get_checkpoint_filename(), store.get_logs_subdir()) == ("checkpoint", "logs")
    named = LocalStore(train_path="/data/t", val_path="/data/v", checkpoint_filename="best")
    assert (named.get_train_data_path(), named.get_val_data_path()) == ("file:///data/t", "file:///data/v")
    assert named.get_checkpoint_path("r") == "file:///data/runs/r/best"
    with pytest.raises(ValueError, match="needs a path"):
        LocalStore()
    for bad in ("", "..", "a/b"):
        with pytest.raises(ValueError, match="run_id is"):
            store.get_run_path(bad)


def test_a_store_travels_to_other_processes(tmp_path: pathlib.Path) -> None:
    for store in (LocalStore(str(tmp_path)), HDFSStore("/a"), FilesystemStore("memory://a")):
        copied = pickle.loads(cloudpickle.dumps(store.to_remote("r", 2)))
        assert copied.train_data_path == store.get_train_data_path(2)
        assert copied.checkpoint_path == store.get_checkpoint_path("r")
        assert copied.saving_runs


@pytest.mark.parametrize("url", ["{}", "memory://stores/sync"])
def test_the_output_of_a_run_is_copied(tmp_path: pathlib.Path, url: str) -> None:
    store = Store.create(url.format(tmp_path / "store"))
    remote = store.to_remote("run", None)
    with remote.get_local_output_dir() as folder:
        pathlib.Path(folder, "logs", "deep").mkdir(parents=True)
        pathlib.Path(folder, "logs", "deep", "l").write_bytes(b"log")
        pathlib.Path(folder, remote.checkpoint_filename).write_bytes(b"weights")
        remote.sync(folder)
    assert not pathlib.Path(folder).exists()
    assert store.read(store.get_checkpoint_path("run")) == b"weights"
    assert store.read(f"{store.get_logs_path('run')}/deep/l") == b"log"


def test_parquet_data_sets_are_recognized(tmp_path: pathlib.Path) -> None:
    store = LocalStore(str(tmp_path))
    train = tmp_path / "intermediate_train_data.0"
    assert not store.is_parquet_dataset(str(train))
    train.mkdir()
    assert not store.is_parquet_dataset(str(train))
    assert store.first_free_index() == 1
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2]}), train / "p.parquet")
    (train / "_SUCCESS").touch()
    assert store.is_parquet_dataset(str(train))
    assert store.get_parquet_dataset(str(train)).read().num_rows == 2
    (tmp_path / "text").write_text("no parquet")
    assert not store.is_parquet_dataset(str(tmp_path / "text"))


def test_a_store_that_cannot_be_written_names_path_and_reason(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"the store cannot be written: .*file.*NotADirectoryError"):
        Store.create(str(tmp_path / "file" / "store")).check_writable()
    store = LocalStore(str(tmp_path / "fine"))
    store.check_writable()
    assert not list((tmp_path / "fine").rglob(".ronde-*"))
    apart = LocalStore(str(tmp_path / "fine"), runs_path=str(tmp_path / "file" / "runs"))
    with pytest.raises(OSError, match="file/runs"):
        apart.check_writable()
    LocalStore(str(tmp_path / "fine"), runs_path=str(tmp_path / "file" / "runs"), save_runs=False).check_writable()
    # Data sets that are only read may be where nothing can be written.
    LocalStore(str(tmp_path / "fine"), train_path=str(tmp_path / "file" / "t")).check_writable(data_sets=False)


class Forgetful(LocalStore):
    """A store that reads other contents than were written."""

    def read(self, path: str) -> bytes:
        return super().read(path)[1:]


class WriteOnly(LocalStore):
    def read(self, path: str) -> bytes:
        raise PermissionError(path)


@pytest.mark.parametrize(("kind", "reason"), [(Forgetful, "has other contents"), (WriteOnly, "PermissionError")])
def test_a_store_that_cannot_be_read_is_refused(tmp_path: pathlib.Path, kind: type[LocalStore], reason: str) -> None:
    with pytest.raises(OSError, match=f"the store cannot be read: .*{reason}"):
        kind(str(tmp_path)).check_writable()
    assert not list(tmp_path.rglob(".ronde-*"))


@pytest.mark.parametrize("url", ["{}", "memory://stores/gaps"])
def test_the_complete_data_set_with_the_highest_number_is_found(tmp_path: pathlib.Path, url: str) -> None:
    store = Store.create(url.format(tmp_path / "store"))
    assert HorovodEstimator._data_index(store) is None
    for name in ("2/_SUCCESS", "11/part", "01/_SUCCESS", "x/_SUCCESS"):
        store.write(f"{store.get_train_data_path()}.{name}", b"")
    store.write(f"{store.get_val_data_path(12)}/_SUCCESS", b"")
    assert store.train_data_indices() == [2, 11]
    assert (store.first_free_index(), store.next_index()) == (0, 13)
    # The first one is missing, and the last one incomplete.
    assert HorovodEstimator._data_index(store) == 2
    store.write(f"{store.get_train_data_path(0)}/_SUCCESS", b"")
    assert HorovodEstimator._data_index(store) == 2
    for index in (0, 2):
        store.remove(store.get_train_data_path(index))
    with pytest.raises(ValueError, match=r"none of the data sets up to .*intermediate_train_data.11 has"):
        HorovodEstimator._data_index(store)


def test_paths_of_hdfs() -> None:
    store = HDFSStore("hdfs://namenode01:8020/user/test/horovod")
    assert (store.host, store.port) == ("namenode01", 8020)
    assert store.get_train_data_path() == "hdfs://namenode01:8020/user/test/horovod/intermediate_train_data"
    assert store.get_localized_path(store.get_train_data_path()) == "/user/test/horovod/intermediate_train_data"
    default = HDFSStore("hdfs:///user/test")
    assert (default.host, default.port, default.get_localized_path(default.get_runs_path())) == (
        "default",
        0,
        "/user/test/runs",
    )
    assert HDFSStore("/user/test").get_runs_path() == "hdfs:///user/test/runs"
    assert HDFSStore("/user/test", host="h", port=9).port == 9
    assert HDFSStore(train_path="/u/t", val_path="/u/v").get_val_data_path() == "hdfs:///u/v"
    for bad in ("s3://bucket/x", "relative/path"):
        with pytest.raises(ValueError, match="is no path of HDFS"):
            HDFSStore(bad)
    with pytest.raises(ValueError, match="driver is 'libhdfs3'"):
        HDFSStore("/a", driver="libhdfs3")


def test_paths_of_dbfs() -> None:
    for path in ("/dbfs/a/b", "dbfs:/a/b", "file:///dbfs/a/b"):
        store = DBFSLocalStore(path)
        assert store.get_full_path(path) == "file:///dbfs/a/b"
        assert store.get_localized_path(store.get_train_data_path()) == "/dbfs/a/b/intermediate_train_data"
    with pytest.raises(ValueError, match="is no path of DBFS"):
        DBFSLocalStore("/tmp/a")


def test_schemes_of_spark_are_those_of_fsspec() -> None:
    store = FilesystemStore("memory://a")
    assert store.SCHEMES["s3a"] == "s3"
    with pytest.raises(TypeError, match="has no argument typo"):
        FilesystemStore("memory://a", typo=1)


def test_parquet_is_read_through_fsspec() -> None:
    store = FilesystemStore("memory://parquet/data")
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"x": list(range(9)), "y": [[1.0, 2.0]] * 9}), buffer, row_group_size=4)
    store.write(f"{store.get_train_data_path(0)}/part-0.parquet", buffer.getvalue())
    assert get_simple_meta_from_parquet(store, ["x"], ["y"], dataset_idx=0)[:3] == (
        9,
        0,
        {"x": {"dtype": "int64", "shape": []}, "y": {"dtype": "float64", "shape": [2]}},
    )
    path, filesystem = store.get_localized_path(store.get_train_data_path(0)), store.arrow_filesystem()
    read = [ShardReader(path, rank, 2, ["x"], filesystem).blocks() for rank in range(2)]
    assert [[row for block in blocks for row in block["x"].tolist()] for blocks in read] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8],
    ]
    with pytest.raises(ValueError, match=r"has no column 'z'; it has x, y"):
        get_simple_meta_from_parquet(store, ["z"], ["y"], dataset_idx=0)
    with pytest.raises(ValueError, match="there is no Parquet data set at"):
        get_simple_meta_from_parquet(store, ["x"], ["y"])


def test_columns_that_do_not_fit_a_model_are_refused() -> None:
    metadata = {"a": {"shape": [4]}, "b": {"shape": []}, "c": {"shape": [3, 4]}}
    check_shape_compatibility(metadata, ["a"], ["b"], [[2, 2]], [[1]])
    # As a model has them, with a first dimension for the batch.
    check_shape_compatibility(metadata, ["a", "c"], ["b", "c"], [[-1, 2, 2], (None, 12)], [[-1], (None, 4, 3)])
    # Scores of three classes for a label that is a number.
    check_shape_compatibility(metadata, ["a"], ["b"], [[2, 2]], [[3]], [[1]])
    for shapes, message in [
        (([[4], [4]], None, None), "1 feature columns, but the model has 2 inputs"),
        (([[4]], [[1], [1]], None), "1 label columns, but the model has 2 outputs"),
        ((None, [[1]], [[1], [1]]), "1 label columns, but there are 2 label_shapes"),
        (([[5]], None, None), r"column 'a' has 4 values a row, which do not fit the shape \[5\]"),
        (([[-1, 8]], None, None), r"column 'a' has 4 values a row, which do not fit the shape \[-1, 8\]"),
        ((None, [[3]], None), r"column 'b' has 1 values a row, which do not fit the shape \[3\]"),
        ((None, [(None, 2)], None), "column 'b' has 1 values a row"),
        ((None, [[1]], [[2]]), "column 'b' has 1 values a row"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_shape_compatibility(metadata, ["a"], ["b"], *shapes)


def test_shapes_are_also_the_numbers_of_horovods_metadata() -> None:
    metadata = {"a": {"shape": 12}, "ragged": {"shape": None}, "b": {"shape": 1}}
    check_shape_compatibility(metadata, ["a", "ragged"], ["b"], [[-1, 3, 4], [7]], [[1]])
    with pytest.raises(ValueError, match="column 'a' has 12 values a row"):
        check_shape_compatibility(metadata, ["a", "ragged"], ["b"], [[-1, 3, 5], [7]], [[1]])


def test_a_saved_store_has_no_storage_options() -> None:
    store = FilesystemStore("memory://saved", storage_options={"secret": "hunter2"})
    saved = stored("store", without_credentials(store))
    assert b"hunter2" not in saved.content
    assert restored(saved).storage_options == {}
    assert restored(saved).prefix_path == store.prefix_path
    assert store.storage_options == {"secret": "hunter2"}
    assert without_credentials(5) == 5


def test_a_saved_store_of_hdfs_has_no_extra_conf() -> None:
    store = HDFSStore("hdfs://node:8020/saved", user="me", extra_conf={"fs.key": "hunter2"})
    saved = stored("store", without_credentials(store))
    assert b"hunter2" not in saved.content
    assert restored(saved)._connection == {"user": "me"}
    assert restored(saved).prefix_path == store.prefix_path
    assert store._connection["extra_conf"] == {"fs.key": "hunter2"}


def test_a_model_names_the_columns_that_it_adds() -> None:
    model = TorchModel(label_columns=["y", "z"])
    assert model.getOutputCols() == ["y__output", "z__output"]
    assert model.setOutputCols(["a", "b"]).getOutputCols() == ["a", "b"]
    assert model.getOrDefault(model.outputCols) == ["a", "b"]
