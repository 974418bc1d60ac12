"""Columns of Arrow as arrays of NumPy: one row of an array for each row of a column.

Numbers, booleans and decimals become arrays of one dimension, lists of equal length ones of more dimensions, and
compressed sparse vectors (see `ronde.spark.common.schema`) dense float64 rows. Bytes and strings become arrays of
objects, for transformation functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import pyarrow

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = Any
Block = dict[str, Array]
"""Columns by their names, all with the same number of rows."""

SPARSE_FIELDS = ["size", "indices", "values"]
"""The fields of a compressed sparse vector."""


def arrays_of(table: pyarrow.Table) -> Block:
    """Returns the columns of a table. Raises ValueError with the column's name for null and ragged ones."""
    return {name: array_of(name, table.column(name).combine_chunks()) for name in table.column_names}


def array_of(name: str, column: Any) -> Array:
    """Returns a column as an array.

    column -- pyarrow.Array, or ChunkedArray of one chunk

    Raises ValueError with `name` for null values, lists of different lengths, and types that are no numbers.
    """
    if isinstance(column, pyarrow.ChunkedArray):
        column = pyarrow.concat_arrays(column.chunks) if column.num_chunks else pyarrow.array([], column.type)
    if column.null_count:
        raise ValueError(
            f"column {name!r} has {column.null_count} null values in {len(column)} rows; a model cannot train on them: "
            "fill or drop these rows (DataFrame.na)"
        )
    kind = column.type
    if pyarrow.types.is_struct(kind):
        return _dense(name, column)
    if pyarrow.types.is_fixed_size_list(kind):
        return _nested(name, column.flatten(), len(column), kind.list_size)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return _nested(name, column.flatten(), len(column), _length_of_lists(name, column))
    if pyarrow.types.is_decimal(kind):
        return column.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
    if any(is_kind(kind) for is_kind in _AS_NUMPY):
        return column.to_numpy(zero_copy_only=False)
    raise ValueError(f"column {name!r} has the type {kind}; supported are numbers, and lists and vectors of them")


_AS_NUMPY = [
    pyarrow.types.is_integer,
    pyarrow.types.is_floating,
    pyarrow.types.is_boolean,
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
]


def _length_of_lists(name: str, column: Any) -> int:
    """The common length of a column's lists."""
    if not len(column):
        return 0
    lengths = numpy.diff(column.offsets.to_numpy(zero_copy_only=False))
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest != longest:
        raise ValueError(
            f"column {name!r} is ragged: its lists have from {shortest} to {longest} elements. All rows of a column "
            "need the same shape: pad or cut them"
        )
    return longest


def _nested(name: str, elements: Any, rows: int, length: int) -> Array:
    inner = array_of(name, elements)
    return inner.reshape(rows, length, *inner.shape[1:])


def _dense(name: str, column: Any) -> Array:
    """Rows of compressed sparse vectors."""
    if [field.name for field in column.type] != SPARSE_FIELDS:
        raise ValueError(f"column {name!r} has the type {column.type}; supported are numbers, lists and vectors")
    sizes = column.field("size").to_numpy()
    if len(sizes) and sizes.min() != sizes.max():
        raise ValueError(
            f"column {name!r} is ragged: its vectors have from {sizes.min()} to {sizes.max()} elements. All rows of a "
            "column need the same shape"
        )
    dense = numpy.zeros((len(column), int(sizes[0]) if len(sizes) else 0))
    lists = column.field("indices")
    rows = numpy.repeat(numpy.arange(len(column)), numpy.diff(lists.offsets.to_numpy()))
    dense[rows, lists.flatten().to_numpy()] = column.field("values").flatten().to_numpy()
    return dense


def rows_of(block: Mapping[str, Array]) -> int:
    """Returns the number of rows of a block; 0 for one without columns."""
    return len(next(iter(block.values()))) if block else 0


def joined(blocks: list[Block]) -> Block:
    """Returns the rows of all blocks. Raises ValueError for a column whose shape differs between blocks."""
    if len(blocks) == 1:
        return blocks[0]
    shapes = {name: {block[name].shape[1:] for block in blocks} for name in blocks[0]}
    for name, found in shapes.items():
        if len(found) > 1:
            raise ValueError(
                f"column {name!r} is ragged: its rows have the shapes {sorted(found)}. All rows of a column need the "
                "same shape: pad or cut them"
            )
    return {name: numpy.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def cut(block: Block, start: int, stop: int) -> Block:
    """Returns views of some of a block's rows."""
    return {name: array[start:stop] for name, array in block.items()}


def taken(block: Block, order: Any) -> Block:
    """Returns copies of rows in another order."""
    return {name: array[order] for name, array in block.items()}
