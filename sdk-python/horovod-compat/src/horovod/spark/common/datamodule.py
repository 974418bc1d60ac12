"""What estimators read batches by."""

from ronde.spark.data.module import DataModule, ParquetDataModule

PetastormDataModule = ParquetDataModule
"""ParquetDataModule, under the name of Horovod's default. Petastorm is not used."""

__all__ = ["DataModule", "ParquetDataModule", "PetastormDataModule"]
