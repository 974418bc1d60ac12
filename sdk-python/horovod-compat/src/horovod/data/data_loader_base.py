"""Horovod's module name for the base class of data loaders."""

from ronde.data import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
