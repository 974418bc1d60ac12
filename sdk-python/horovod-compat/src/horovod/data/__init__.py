"""Data loading in parallel with computation: `ronde.data`."""

from ronde.data import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
