"""Writes, reads and shows reports."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from ronde.bench.errors import OutputError, UsageError
from ronde.bench.run import SCHEMA
from ronde.bench.table import render

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The average of cores busy with other work above which results are distorted.
OTHER_WORK_CORES_MOST = 0.1


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads a report from a JSON file. Raises UsageError."""
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        schema = report.get("schema")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read as a report: {error}; `ronde bench --json FILE` writes one") from error
    if schema != SCHEMA:
        raise UsageError(f"{path} is of schema {schema!r}; this release reads {SCHEMA!r}")
    if not report.get("worlds"):
        raise UsageError(f"{path} has no measurement; run `ronde bench --json FILE` again")
    return report


@contextlib.contextmanager
def complete(paths: Sequence[pathlib.Path]) -> Iterator[None]:
    """Says which files are read when a report lacks what its schema has."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        names = ", ".join(map(str, paths))
        raise UsageError(f"{names}: not a complete report: {type(error).__name__}: {error}") from error


def finish(report: dict[str, Any]) -> None:
    """Adds notes that are known only at the end."""
    for world in report["worlds"]:
        cores = world["other_work_cores"]
        if cores > OTHER_WORK_CORES_MOST:
            report["notes"].append(
                f"with {world['ranks']} ranks on {world['hosts']} host(s) other work took {cores:.2f} cores: "
                "times are worth little; repeat it on a quiet machine"
            )


def show(
    report: dict[str, Any], json_path: pathlib.Path | None, markdown: pathlib.Path | None, plot: pathlib.Path | None
) -> None:
    """Prints the tables and writes the requested files."""
    # Write results first: they must not be lost if the plot fails.
    if json_path is not None:
        write(json_path, json.dumps(report, indent=1) + "\n")
    sys.stdout.write(render(report))
    sys.stdout.flush()
    if markdown is not None:
        write(markdown, render(report, markdown=True))
    if plot is not None:
        from ronde.bench.plot import draw

        draw(report, plot)


def write_page(reports: Sequence[tuple[pathlib.Path, dict[str, Any]]], path: pathlib.Path) -> None:
    """Writes the page of plots."""
    from ronde.bench.page import page

    write(path, page([(name.name, report) for name, report in reports]))


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file. Raises OutputError."""
    try:
        path.write_text(text)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}") from error
