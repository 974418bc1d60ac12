"""Imports a framework, or says what to do where it is not installed."""

import importlib

# What the extra of a module's name installs. Commands name the packages, not "ronde[torch]", because pip would take the
# package ronde from PyPI where this one is not installed, and that would be somebody else's.
PACKAGES = {
    "torch": '"torch>=2.1"',
    "tensorflow": '"tensorflow>=2.16"',
    "keras": '"keras>=3" "tensorflow>=2.16"',
    "jax": '"jax>=0.4.38"',
    "lightning": '"torch>=2.1" "lightning>=2.2"',
}


def require(module: str, product: str) -> None:
    """Imports a module. Raises ImportError with the command that installs it."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(
            f"this module needs {product}, which is not installed: pip install {PACKAGES[module]} ({of_wheel(module)})",
            name=module,
        ) from error


def of_wheel(extra: str) -> str:
    """How messages name an extra."""
    return f"the extra `{extra}` of ronde's wheel"
