"""Saving and loading of estimators and models, by Spark ML's `write`, `save`, `read` and `load`.

A saved object is a folder: Spark's `metadata`, and Parquet files in `values` with the parameters. Numbers, strings and
lists of them are JSON, models of Keras its own format, and the rest, such as functions and PyTorch's models, pickled.
The `storage_options` of a store, and HDFSStore's `extra_conf`, are left out, because they may contain credentials.
**Loading runs code of whoever wrote the folder, as torch.load does without weights_only: load only what you trust.**
"""

from __future__ import annotations

import json
import posixpath
from typing import Any, NamedTuple

import pyspark
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import types

from ronde.spark.common.pickling import dumps, loads
from ronde.spark.common.store import Store

_ROW = types.StructType(
    [
        types.StructField("name", types.StringType()),
        types.StructField("format", types.StringType()),
        types.StructField("content", types.BinaryType()),
    ]
)
JSON, PICKLE = "json", "pickle"


class Stored(NamedTuple):
    """A parameter's value as bytes.

    name    -- of the parameter
    format  -- "json", "pickle", or one of the framework's
    content -- the value
    """

    name: str
    format: str
    content: bytes


def stored(name: str, value: Any) -> Stored:
    """Returns a value as JSON if it is the same after that, else pickled. Raises TypeError if that fails."""
    try:
        text = json.dumps(value)
        if _is_same(json.loads(text), value):
            return Stored(name, JSON, text.encode())
    except (TypeError, ValueError):
        pass
    return Stored(name, PICKLE, dumps(value, f"the value of {name}"))


def without_credentials(value: Any) -> Any:
    """Returns a store without the options that may contain credentials; any other value as it is."""
    return value.without_credentials() if isinstance(value, Store) else value


def restored(row: Stored) -> Any:
    """Returns the value of `stored`. Raises ValueError for an unknown format."""
    if row.format == JSON:
        return json.loads(row.content)
    if row.format == PICKLE:
        return loads(row.content)
    raise ValueError(f"the saved parameter {row.name} has the format {row.format!r}, which this release does not know")


def _is_same(copied: Any, value: Any) -> bool:
    """Whether values and their types are equal: JSON makes lists of tuples."""
    if type(copied) is not type(value):
        return False
    if isinstance(value, list):
        return all(_is_same(mine, given) for mine, given in zip(copied, value))
    if isinstance(value, dict):
        return list(copied) == list(value) and all(_is_same(copied[key], value[key]) for key in value)
    return bool(copied == value)


class Writer(MLWriter):  # type: ignore[misc, unused-ignore]
    """Writes an estimator or a model to a folder."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 -- Spark's name
        """Writes metadata and parameters. Raises TypeError for a parameter that cannot be pickled."""
        values = {param.name: without_credentials(value) for param, value in self.instance._paramMap.items()}
        rows = self.instance.encoded(values)
        DefaultParamsWriter.saveMetadata(self.instance, path, _context(self), paramMap={})
        contents = [(row.name, row.format, bytearray(row.content)) for row in rows]
        made = self.sparkSession.createDataFrame(contents, _ROW)
        made.coalesce(1).write.parquet(posixpath.join(path, "values"))


class Reader(MLReader):  # type: ignore[misc, type-arg, unused-ignore]
    """Reads what `Writer` has written."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> Any:
        """Returns the object. Unpickles: see the module. Raises TypeError for an object of another class."""
        metadata = DefaultParamsReader.loadMetadata(path, _context(self))
        mine = f"{self.kind.__module__}.{self.kind.__name__}"
        if metadata["class"] != mine:
            raise TypeError(f"{path} has a {metadata['class']}, not a {mine}; load it with that class")
        rows = self.sparkSession.read.parquet(posixpath.join(path, "values")).collect()
        values = self.kind.decoded([Stored(row["name"], row["format"], bytes(row["content"])) for row in rows])
        made = self.kind()
        made._resetUid(metadata["uid"])
        for name, value in values.items():
            made._paramMap[getattr(made, name)] = value
        return made


def _context(access: Any) -> Any:
    """What Spark writes metadata by: the session since Spark 4, the context before."""
    return access.sparkSession if int(pyspark.__version__.split(".")[0]) >= 4 else access.sc


class Persistent(MLWritable, MLReadable):  # type: ignore[misc, type-arg, unused-ignore]
    """Gives an estimator or a model `write`, `save`, `read` and `load`."""

    def write(self) -> Writer:
        """Returns the writer: `.overwrite().save(path)`."""
        return Writer(self)

    @classmethod
    def read(cls) -> Reader:
        """Returns the reader: `.load(path)`."""
        return Reader(cls)

    def encoded(self, values: dict[str, Any]) -> list[Stored]:
        """Returns parameters as bytes. Frameworks override it for their formats."""
        return [stored(name, value) for name, value in values.items()]

    @classmethod
    def decoded(cls, rows: list[Stored]) -> dict[str, Any]:
        """Returns the parameters of `encoded`."""
        return {row.name: restored(row) for row in rows}
