"""Errors that end a benchmark without results."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot continue. The text says what failed, where, and what to do."""

    exit_status = 2


class UsageError(BenchError):
    """The command line is invalid."""

    exit_status = 64


class WrongResultError(BenchError):
    """A backend gave a wrong result. The text contains case, rank, iteration and element."""

    exit_status = 1
