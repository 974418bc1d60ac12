"""Data loading in parallel with computation: a base class for data loaders, and a mixin that prefetches in a thread."""

from ronde.data.loader import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
