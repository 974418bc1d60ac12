"""Loading data while the model computes: a base for data loaders, and a mixin that reads ahead in a thread."""

from ronde.data.loader import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
