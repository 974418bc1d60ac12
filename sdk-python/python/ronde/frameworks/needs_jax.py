"""Imports JAX. Raises ImportError that says what to do where it is not installed."""

from ronde.frameworks.requirement import require

require("jax", "JAX")
