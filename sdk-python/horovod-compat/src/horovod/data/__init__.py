"""Loading data while the model computes: `ronde.data`."""

from ronde.data import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
