"""Pickling of what a program gives an estimator, with errors that name it."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle


def dumps(value: Any, what: str, named: Any = None) -> bytes:
    """Returns a pickled object; functions and classes of the program are included.

    what  -- names the object in errors, such as "the model"
    named -- an object inside, whose class is named; default: the object itself

    Raises TypeError that names it if it cannot be pickled.
    """
    try:
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(unpicklable(what, value if named is None else named, error)) from error
    return content


def unpicklable(what: str, value: Any, error: BaseException) -> str:
    """Returns the text of an error for an object that cannot be pickled."""
    return (
        f"{what} ({type(value).__name__}) cannot be pickled, so it cannot be sent to the processes that train: "
        f"{type(error).__name__}: {error}. Remove open files, locks, generators and connections from it, or create "
        "them where they are used"
    )


def loads(content: bytes) -> Any:
    """Unpickles what `dumps` made. This runs code of whoever made it."""
    return pickle.loads(content)
