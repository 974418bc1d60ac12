"""Which rows ranks read from Parquet, and how: without Spark, compared with NumPy."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ronde.spark.common.task import check_shapes
from ronde.spark.data import AsyncParquetDataLoader, ParquetDataLoader, ParquetDataModule, ShardReader
from ronde.spark.data.columns import array_of
from ronde.spark.data.loader import transform_of
from ronde.spark.data.pytorch import PytorchDataLoader, PytorchInfiniteDataLoader, PytorchInmemDataLoader
from ronde.spark.data.rows import RowGroup, batch_sizes, pieces_of, steps_of
from ronde.spark.data.shuffle import shuffled
from test_run import check_gone

GROUPS = st.lists(st.integers(0, 40), max_size=12)


@given(GROUPS, st.integers(1, 9))
def test_each_row_is_read_by_exactly_one_rank(rows: list[int], size: int) -> None:
    groups = [RowGroup(f"f{index // 3}", index % 3, count) for index, count in enumerate(rows)]
    first = dict(zip([group[:2] for group in groups], numpy.cumsum([0, *rows])))
    read = []
    for rank in range(size):
        pieces = pieces_of(rank, size, groups)
        mine = [first[piece.path, piece.number] + row for piece in pieces for row in range(piece.start, piece.stop)]
        assert len(mine) in (sum(rows) // size, -(-sum(rows) // size))
        read += mine
    assert read == list(range(sum(rows)))


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 40))
def test_all_ranks_have_the_same_number_of_batches_that_are_not_empty(rows: int, size: int, batch: int) -> None:
    if rows < size:
        with pytest.raises(ValueError, match=rf"{rows} rows for {size} processes"):
            steps_of(rows, size, batch)
        return
    steps = steps_of(rows, size, batch)
    for rank in range(size):
        mine = (rank + 1) * rows // size - rank * rows // size
        sizes = batch_sizes(mine, steps, batch)
        assert len(sizes) == steps
        assert sum(sizes) == mine
        assert sizes[:-1] == [batch] * (steps - 1)
        assert 1 <= sizes[-1] <= batch + 2
        # Batch normalization has no variance in a batch of one row.
        assert sizes[-1] > 1 or batch == 1 or mine == 1


def test_a_row_that_is_left_over_is_no_batch_of_its_own() -> None:
    assert batch_sizes(33, steps_of(66, 2, 32), 32) == [33]
    assert batch_sizes(34, steps_of(67, 2, 32), 32) == [34]
    assert batch_sizes(34, steps_of(68, 2, 32), 32) == [32, 2]
    assert batch_sizes(1, steps_of(2, 2, 32), 32) == [1]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(1, 25),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 40),
)
def test_a_shuffled_pass_has_each_row_once(
    files: list[int], group: int, size: int, batch: int, buffer_rows: int
) -> None:
    total = sum(files)
    size = min(size, total)
    with tempfile.TemporaryDirectory() as folder:
        ids = write_files(folder, files, group)
        loaders = [loader_of(folder, rank, size, batch, buffer_rows) for rank in range(size)]
        assert len({len(loader) for loader in loaders}) == 1
        for _ in range(2):
            seen = [row for loader in loaders for each in loader for row in checked(each)]
            assert sorted(seen) == list(ids)


def write_files(folder: str, files: list[int], group: int) -> range:
    """Writes files with these numbers of rows; rows are numbered. Returns the numbers."""
    first = 0
    for index, rows in enumerate(files):
        ids = numpy.arange(first, first + rows)
        table = pyarrow.table({"id": ids, "pair": pyarrow.array([[each, each / 2] for each in ids.tolist()])})
        pyarrow.parquet.write_table(table, f"{folder}/part-{index:03}.parquet", row_group_size=group)
        first += rows
    return range(first)


def loader_of(folder: str, rank: int, size: int, batch: int, buffer_rows: int | None) -> AsyncParquetDataLoader:
    reader = ShardReader(folder, rank, size)
    return AsyncParquetDataLoader(reader=reader, batch_size=batch, shuffle=True, seed=5, buffer_rows=buffer_rows)


def checked(batch: dict[str, Any]) -> list[int]:
    """The numbers of a batch's rows, whose columns belong together."""
    assert numpy.array_equal(batch["pair"], numpy.stack([batch["id"], batch["id"] / 2], axis=1))
    found: list[int] = batch["id"].tolist()
    return found


def test_the_same_seed_gives_the_same_order_and_another_pass_another_one(tmp_path: pathlib.Path) -> None:
    write_files(str(tmp_path), [50, 30], 7)
    first = loader_of(str(tmp_path), 0, 2, 8, 1000)
    passes = [[row for batch in first for row in batch["id"].tolist()] for _ in range(2)]
    again = loader_of(str(tmp_path), 0, 2, 8, 1000)
    assert [row for batch in again for row in batch["id"].tolist()] == passes[0]
    assert passes[0] != passes[1] != sorted(passes[1])
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(40))


@pytest.mark.parametrize("pool", ["thread", "process", "dummy"])
def test_readers_of_all_kinds_read_the_same(tmp_path: pathlib.Path, pool: str) -> None:
    write_files(str(tmp_path), [20, 11], 6)
    reader = ShardReader(str(tmp_path), 1, 2, ["id"], workers=2, pool=pool)
    for _ in range(2):
        assert [row for block in reader.blocks() for row in block["id"].tolist()] == list(range(15, 31))
    reader.close()


def test_another_number_of_steps_continues_where_the_pass_before_ended(tmp_path: pathlib.Path) -> None:
    write_files(str(tmp_path), [10], 4)
    loader = ParquetDataLoader(ShardReader(str(tmp_path)), 4, steps=2)
    read = [[batch["id"].tolist() for batch in loader] for _ in range(3)]
    rows = [*range(10), *range(10), *range(4)]
    assert read == [[rows[at : at + 4], rows[at + 4 : at + 8]] for at in (0, 8, 16)]


def test_a_cache_reads_files_once(tmp_path: pathlib.Path) -> None:
    write_files(str(tmp_path), [30], 7)
    loader = ParquetDataLoader(ShardReader(str(tmp_path)), 8, shuffle=True, cache=True)
    first = [row for batch in loader for row in checked(batch)]
    for file in tmp_path.iterdir():
        file.unlink()
    second = [row for batch in loader for row in checked(batch)]
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second


def test_a_program_that_changes_its_batches_does_not_change_the_cache(tmp_path: pathlib.Path) -> None:
    write_files(str(tmp_path), [30], 7)
    for shuffle in (False, True):
        loader = ParquetDataLoader(ShardReader(str(tmp_path)), 8, shuffle=shuffle, cache=True)
        for _ in range(3):
            read = []
            for batch in loader:
                read += batch["id"].tolist()
                batch["id"][:] = -1
            assert sorted(read) == list(range(30))


PROCESSES = """
import multiprocessing, sys, time
from ronde.spark.data.reader import ShardReader

if __name__ == "__main__":
    reader = ShardReader(sys.argv[1], columns=["id"], workers=2, pool="process")
    list(reader.blocks())
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    time.sleep(600)
"""


def test_processes_of_a_reader_end_with_a_rank_that_is_killed(tmp_path: pathlib.Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "rows"
    folder.mkdir()
    write_files(str(folder), [20, 11], 6)
    program.write_text(PROCESSES)
    with subprocess.Popen([sys.executable, str(program), str(folder)], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert pids
        rank.kill()
    check_gone(pids)


def test_the_shuffling_buffer_is_bounded() -> None:
    held = []

    def blocks() -> Any:
        for index in range(100):
            held.append(index)
            yield {"x": numpy.arange(index * 10, index * 10 + 10)}

    mixed = shuffled(blocks(), 50, numpy.random.default_rng(0))
    first = next(mixed)
    assert len(held) == 5
    assert len(first["x"]) == 25
    assert sorted([*first["x"], *(row for block in mixed for row in block["x"])]) == list(range(1000))


def test_columns_of_all_kinds_become_arrays() -> None:
    sparse = [{"size": 4, "indices": [1, 3], "values": [5.0, 6.0]}, {"size": 4, "indices": [], "values": []}]
    decimals = pyarrow.array([1, 2]).cast(pyarrow.decimal128(25, 2))
    for column, expected in [
        (pyarrow.array([1, 2], pyarrow.int8()), numpy.array([1, 2], numpy.int8)),
        (pyarrow.array([True, False]), numpy.array([True, False])),
        (decimals, numpy.array([1.0, 2.0])),
        (pyarrow.array([[1.5, 2], [3, 4]]), numpy.array([[1.5, 2], [3, 4]])),
        (pyarrow.array([[9], [[1][0]], [5], [6]]).slice(1, 2), numpy.array([[1], [5]])),
        (pyarrow.array([[[1], [2]], [[3], [4]]]), numpy.array([[[1], [2]], [[3], [4]]])),
        (pyarrow.array([[1, 2]] * 3, pyarrow.list_(pyarrow.float32(), 2)), numpy.array([[1, 2]] * 3, numpy.float32)),
        (pyarrow.array(sparse), numpy.array([[0, 5.0, 0, 6.0], [0, 0, 0, 0]])),
        (pyarrow.array([], pyarrow.list_(pyarrow.float64())), numpy.zeros((0, 0))),
    ]:
        found = array_of("c", column)
        assert found.dtype == expected.dtype
        assert numpy.array_equal(found, expected)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([1, None, 3], "column 'bad' has 1 null values in 3 rows"),
        ([[1], [1, 2]], "column 'bad' is ragged: its lists have from 1 to 2 elements"),
        ([[1], None], "column 'bad' has 1 null values"),
        ([[1], [None]], "column 'bad' has 1 null values"),
        ([{"a": 1}], "column 'bad' has the type struct<a: int64>"),
    ],
)
def test_a_bad_column_is_named_with_its_file(tmp_path: pathlib.Path, column: list[Any], message: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"bad": pyarrow.array(column)}), tmp_path / "p.parquet")
    loader = AsyncParquetDataLoader(reader=ShardReader(str(tmp_path)), batch_size=1)
    with pytest.raises(ValueError, match=f"p.parquet, row group 0: {message}"):
        list(loader)


def test_rows_that_differ_between_row_groups_are_ragged(tmp_path: pathlib.Path) -> None:
    table = pyarrow.table({"v": pyarrow.array([[1.0], [2.0], [3.0, 4.0]])})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet", row_group_size=2)
    with pytest.raises(ValueError, match="column 'v' is ragged"):
        list(ParquetDataLoader(ShardReader(str(tmp_path)), 3))


def test_a_missing_column_is_named(tmp_path: pathlib.Path) -> None:
    write_files(str(tmp_path), [3], 3)
    with pytest.raises(ValueError, match=r"has no column 'nope'; it has id, pair"):
        ShardReader(str(tmp_path), columns=["id", "nope"])


def test_transformations_take_frames_with_or_without_a_constructor() -> None:
    def doubled(frame: Any) -> Any:
        frame["double"] = frame["x"] * 2
        return frame

    batch = {"x": numpy.array([1, 2]), "v": numpy.array([[1.0, 2.0], [3.0, 4.0]])}
    for function in (doubled, lambda: doubled):
        transform = transform_of(function, removed=["x"])
        assert transform is not None
        found = transform(batch)
        assert sorted(found) == ["double", "v"]
        assert found["double"].tolist() == [2, 4]
        assert numpy.array_equal(found["v"], batch["v"])
    assert transform_of(None) is None
    with pytest.raises(TypeError, match="cannot be called"):
        transform_of(3)


def test_a_data_module_gives_training_and_validation_batches(tmp_path: pathlib.Path) -> None:
    for part, rows in (("train", 20), ("val", 6)):
        (tmp_path / part).mkdir()
        write_files(str(tmp_path / part), [rows], 5)
    module = ParquetDataModule(
        train_dir=str(tmp_path / "train"),
        val_dir=str(tmp_path / "val"),
        train_batch_size=4,
        val_batch_size=2,
        cur_shard=1,
        shard_count=2,
        schema_fields=["id"],
        steps_per_epoch_train=3,
        steps_per_epoch_val=1,
        transform_fn=lambda frame: frame.assign(id=frame["id"] + 100),
    )
    with module as data:
        train = [row for batch in data.train_data() for row in batch["id"].tolist()]
        val = [row for batch in data.val_data() for row in batch["id"].tolist()]
    assert sorted(train) == list(range(110, 120))
    assert val == [103, 104, 105]


@pytest.mark.parametrize("shape", [[2, 3], [-1, 6], [-1, 3, 2], [3, -1], None])
def test_a_shape_that_fits_is_accepted(shape: Any) -> None:
    check_shapes({"c": {"shape": [6]}}, ["c"], [shape])


@pytest.mark.parametrize("shape", [[5], [-1, 3], [4, -1], []])
def test_a_shape_that_does_not_fit_is_refused_with_the_column(shape: Any) -> None:
    with pytest.raises(ValueError, match="column 'c' has 6 values a row"):
        check_shapes({"c": {"shape": [6]}}, ["c"], [shape])


def test_loaders_of_pytorch_yield_tensors(tmp_path: pathlib.Path) -> None:
    import torch

    write_files(str(tmp_path), [10], 4)
    loader = PytorchDataLoader(ShardReader(str(tmp_path)), 4, 0)
    assert torch.equal(torch.cat([batch["id"] for batch in loader]), torch.arange(10))
    infinite = PytorchInfiniteDataLoader(ShardReader(str(tmp_path)), 4, 0, limit_step_per_epoch=4)
    assert torch.cat([batch["id"] for batch in infinite]).tolist() == [*range(10), *range(6)]
    memory = PytorchInmemDataLoader(ShardReader(str(tmp_path)), 4, num_epochs=2, shuffle=True)
    for _ in range(2):
        assert sorted(torch.cat([batch["id"] for batch in memory]).tolist()) == list(range(10))
