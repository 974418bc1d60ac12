"""Encodes objects as text: pickled by cloudpickle, in base64. Decode only text that your own program encoded."""

from __future__ import annotations

import base64
import pickle
from typing import Any

from ronde.run import dumps


def dumps_base64(obj: Any, to_ascii: bool = True) -> Any:
    """Returns the object as text, or as bytes with `to_ascii=False`. Raises ImportError without cloudpickle."""
    encoded = base64.b64encode(dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Decodes an object of `dumps_base64`. Unpickling can execute any code: never pass untrusted text."""
    return pickle.loads(base64.b64decode(encoded))
