"""Loaders of batches for estimators."""
