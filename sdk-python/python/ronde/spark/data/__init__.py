"""Reading of Parquet data sets by the ranks of a job: each rank its rows, shuffled, in batches, prefetched.

reader = ShardReader(path, rank=hvd.rank(), size=hvd.size(), columns=["features", "label"])
for batch in AsyncParquetDataLoader(reader=reader, batch_size=64, shuffle=True): ...
"""

from ronde.spark.data.loader import AsyncParquetDataLoader, ParquetDataLoader
from ronde.spark.data.module import DataModule, ParquetDataModule
from ronde.spark.data.reader import ShardReader

__all__ = ["AsyncParquetDataLoader", "DataModule", "ParquetDataLoader", "ParquetDataModule", "ShardReader"]
