"""What the estimator reads batches by."""

from horovod.spark.common.datamodule import DataModule, ParquetDataModule, PetastormDataModule

__all__ = ["DataModule", "ParquetDataModule", "PetastormDataModule"]
