"""Errors that end a benchmark without results."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot continue. The text says what failed, where, and what to do."""

    # The exit statuses have the same meaning in all commands of ronde: see docs/ERRORS.md.
    exit_status = 69


class UsageError(BenchError):
    """The command line, or a file that it names, cannot be used."""

    exit_status = 64


class OutputError(BenchError):
    """A file cannot be written."""

    exit_status = 73


class WrongResultError(BenchError):
    """A backend gave a wrong result. The text contains case, rank, iteration and element."""

    exit_status = 1
