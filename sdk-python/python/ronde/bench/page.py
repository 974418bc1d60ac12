"""Writes reports as one HTML page: plots of each collective and the tables, without anything from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ronde.bench import plot
from ronde.bench.cases import World
from ronde.bench.errors import UsageError
from ronde.bench.machine import title as machine_title
from ronde.bench.table import LEGEND, TRAIN_LEGEND, Table, load_text, tables

if TYPE_CHECKING:
    from collections.abc import Sequence

BUS_LEGEND = (
    "Bus bandwidth is the size by the time, corrected by the number of ranks as nccl-tests does, so that it can be "
    "compared with the rate of a link or memory."
)
STYLE = """
:root { color-scheme: light dark; --ink: #1b2430; --back: #fff; --line: #d5dbe3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --back: #14191f; --line: #38424f; } }
body { color: var(--ink); background: var(--back); font: 15px/1.5 system-ui, sans-serif; max-width: 1080px;
  margin: 0 auto; padding: 16px; }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere; }
figure { margin: 0 0 16px; } svg { width: 100%; height: auto; }
div { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
td, th { border-bottom: 1px solid var(--line); padding: 3px 10px; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
"""


def page(reports: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Returns the page of these reports, each with its name. Raises UsageError if there is nothing to show."""
    for name, report in reports:
        if not tables(report):
            raise UsageError(f"{name} has no measurement: nothing can be drawn")
    sections = "\n".join(_report(name, report) for name, report in reports)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>ronde bench</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>ronde bench</h1>\n{sections}\n"
        "</body>\n</html>\n"
    )


def _report(name: str, report: dict[str, Any]) -> str:
    parts = [f"<h2>{escape(name)}</h2>", _paragraph(machine_title(report["machine"])), _paragraph(load_text(report))]
    parts += [_paragraph(f"Note: {note}") for note in report["notes"]]
    for world in report["worlds"]:
        parts += _plots(world)
    parts += [_table(table) for table in tables(report)]
    if any(world["cases"] for world in report["worlds"]):
        parts += [_paragraph(LEGEND), _paragraph(BUS_LEGEND)]
    if any("training" in world for world in report["worlds"]):
        parts.append(_paragraph(TRAIN_LEGEND))
    return "\n".join(parts)


def _plots(world: dict[str, Any]) -> list[str]:
    title = World(world["hosts"], world["ranks"]).title()
    collectives = dict.fromkeys(case["collective"] for case in world["cases"])
    return [
        f"<figure><h3>{escape(collective)}, {escape(title)}</h3>{plot.svg(world, collective)}</figure>"
        for collective in collectives
    ]


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    return f"<h3>{escape(table.title)}</h3>\n<div><table>\n<tr>{head}</tr>\n{rows}</table></div>"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"
