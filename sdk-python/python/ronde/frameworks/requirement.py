"""Imports a framework, or says what to do where it is not installed."""

import importlib


def require(module: str, product: str) -> None:
    """Imports a module. Raises ImportError that names the extra of ronde, which has the module's name."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ImportError(
            f'this module needs {product}, which is not installed: pip install "ronde[{module}]"', name=module
        ) from error
