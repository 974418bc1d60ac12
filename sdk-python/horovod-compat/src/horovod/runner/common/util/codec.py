"""Objects as text: pickled by cloudpickle, in base64. Only decode what your own program has encoded."""

from __future__ import annotations

import base64
import pickle
from typing import Any

from ronde.run import dumps


def dumps_base64(obj: Any, to_ascii: bool = True) -> Any:
    """The object as a text, or as bytes with `to_ascii=False`. Needs cloudpickle, else ImportError."""
    encoded = base64.b64encode(dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """The object that `dumps_base64` has encoded. Runs what a pickle asks for: not for texts of strangers."""
    return pickle.loads(base64.b64decode(encoded))
