"""Where estimators keep data sets, checkpoints and logs."""

from ronde.spark.common.hdfs import HDFSStore
from ronde.spark.common.store import DBFSLocalStore, FilesystemStore, LocalStore, Store

AbstractFilesystemStore = FilesystemStore
"""FilesystemStore, from which the other stores derive, under the name of Horovod's base class."""

__all__ = ["AbstractFilesystemStore", "DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]
