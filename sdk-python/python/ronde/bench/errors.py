"""Why a benchmark ends without figures."""

from __future__ import annotations


class BenchError(Exception):
    """It cannot go on; the text says what, where and what to do."""

    exit_status = 2


class UsageError(BenchError):
    """The command line asks for what cannot be."""

    exit_status = 64


class WrongResultError(BenchError):
    """A backend gave a wrong result: case, rank, iteration and element are in the text."""

    exit_status = 1
