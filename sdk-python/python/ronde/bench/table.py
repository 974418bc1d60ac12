"""The tables of a report, for terminals and as Markdown."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ronde.bench import training_modes
from ronde.bench.cases import ELEMENT_BYTES, KB, World, size_text
from ronde.bench.groups import LABELS
from ronde.bench.machine import cipher_seconds_per_gb
from ronde.bench.machine import title as machine_title

if TYPE_CHECKING:
    from collections.abc import Sequence

    Entry = dict[str, Any]

# Below this size latency dominates, and seconds per GB mean nothing.
CPU_BYTES_LEAST = 64 * KB
LEGEND = (
    "Times are medians with quartiles, of one operation from a barrier until the last rank has its result. "
    "Ratios are ronde's time by the peer's: below 1 ronde is faster. CPU: seconds of all processes for each GB of one "
    "rank's tensor, in a loop without barriers. Gloo + AES: Gloo's CPU time, and that of encrypting and decrypting "
    "each byte that crosses between the hosts once."
)
TRAIN_LEGEND = (
    "Times are medians with quartiles, of one step until the last rank has made it. Efficiency is samples a second "
    "against as many ranks as alone; ranks that share cores cannot reach 1."
)


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as text. The first column contains names, the others numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Formats the table for a terminal."""
        columns = list(zip(self.header, *self.rows))
        widths = [max(map(len, column)) for column in columns]
        lines = [self._line(self.header, widths), *(self._line(row, widths) for row in self.rows)]
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join([self.title, *lines])

    def markdown(self) -> str:
        """Formats the table as Markdown."""
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])

    @staticmethod
    def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
        first, *others = cells
        return "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:]))])


def tables(report: dict[str, Any]) -> list[Table]:
    """Returns all tables of a report."""
    found = []
    cipher = cipher_seconds_per_gb(report["machine"])
    for entry in report["worlds"]:
        world = World(entry["hosts"], entry["ranks"])
        if entry["cases"]:
            found.append(_collectives(world, entry["cases"], cipher if world.hosts == 2 else None))
        if training := entry.get("training"):
            found.append(_training(world.title(), training))
    return found


def render(report: dict[str, Any], markdown: bool = False) -> str:
    """Formats a whole report: machine, tables, notes."""
    machine = report["machine"]
    blocks = [machine_title(machine)]
    blocks.append(load_text(report))
    blocks += [table.markdown() if markdown else table.text() for table in tables(report)]
    if any(world["cases"] for world in report["worlds"]):
        blocks.append(LEGEND)
    if any("training" in world for world in report["worlds"]):
        blocks.append(TRAIN_LEGEND)
    blocks += [f"Note: {note}" for note in report["notes"]]
    return "\n\n".join(blocks) + "\n"


def load_text(report: dict[str, Any]) -> str:
    """Says how busy the machine was with other work."""
    machine = report["machine"]
    before, after = machine["load_average_before"][0], machine["load_average_after"][0]
    return f"Load average {before:.2f} before and {after:.2f} after; {_other_work(report)}{_idle(report)}"


def series_label(entry: Entry, is_only: bool = False) -> str:
    """Returns the label of a backend and the target of its results."""
    label = LABELS[entry["backend"]]
    return label if is_only else f"{label} {entry['variant']}"


def time_text(seconds: float) -> str:
    """Formats a time with three digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 * factor else f"{seconds / factor:.0f} {unit}"
    return f"{seconds * 1e6:.0f} us" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"


def _collectives(world: World, cases: Sequence[dict[str, Any]], cipher: float | None) -> Table:
    """Returns a table with a row for each case and variant of ronde, and a column for each peer.

    With `cipher`, the seconds of encrypting and decrypting a GB, it has a column of Gloo's time with encryption.
    """
    peers = list(dict.fromkeys(entry["backend"] for case in cases for entry in case["entries"]))[1:]
    header = ["operation", "ronde", *(LABELS[name] for name in peers)]
    header += [f"ronde / {LABELS[name]}" for name in peers]
    header += ["CPU s/GB: ronde", *(LABELS[name] for name in peers)]
    has_reference = cipher is not None and "gloo" in peers
    if has_reference:
        header.append(f"{LABELS['gloo']} + AES")
    rows = []
    for case in cases:
        by_name = {entry["backend"]: entry for entry in case["entries"]}
        others = [by_name.get(name) for name in peers]
        for own in case["entries"]:
            if own["backend"] != "ronde":
                continue
            name = f"{case['collective']} {size_text(case['bytes'])}, {own['variant']}"
            cells = [name, _spread(own), *map(_spread, others), *(_ratio(own, other) for other in others)]
            is_small = case["bytes"] < CPU_BYTES_LEAST
            cells += ["" if is_small else _cpu(entry) for entry in (own, *others)]
            if has_reference:
                more = world.bytes_sent(case["collective"]) * (cipher or 0)
                cells.append("" if is_small else _cpu(by_name.get("gloo"), more))
            rows.append(cells)
    return Table(world.title(), header, rows)


def _training(title: str, training: dict[str, Any]) -> Table:
    entries = {entry["way"]: entry for entry in training["entries"]}
    barrier_seconds, alone = (
        entries[training_modes.BARRIER]["seconds"]["median"],
        entries[training_modes.ALONE]["samples_per_second"],
    )
    megabytes = training["parameters"] * ELEMENT_BYTES / 1e6
    title = (
        f"{title}: training {training['model']}, {training['parameters'] / 1e6:.1f} M parameters "
        f"({megabytes:.0f} MB of gradients), batch {training['batch']} a rank"
    )
    rows = []
    for mode, entry in entries.items():
        efficiency = entry["samples_per_second"] / (alone * entry["ranks"])
        rows.append(
            [
                training_modes.label(mode),
                _spread(entry),
                f"{entry['seconds']['median'] / barrier_seconds:.2f}",
                f"{entry['samples_per_second']:.4g}",
                f"{efficiency:.2f}",
                f"{entry['cpu_seconds_per_step']:.3g}",
                *_megabytes(entry.get("sent_bytes_per_step")),
            ]
        )
    header = ["step", "time", "/ barrier only", "samples/s", "efficiency", "CPU s/step", "MB sent/step"]
    return Table(title, header[: len(rows[0])], rows)


def _megabytes(sent_bytes: float | None) -> list[str]:
    """Returns the cell of what hosts sent each other; none on one host."""
    return [] if sent_bytes is None else [f"{sent_bytes / 1e6:.1f}"]


def _spread(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    seconds = entry["seconds"]
    quartiles = (time_text(seconds[key]) for key in ("lower_quartile", "upper_quartile"))
    return f"{time_text(seconds['median'])} [{', '.join(quartiles)}]"


def _ratio(own: Entry, other: Entry | None) -> str:
    return "-" if other is None else f"{ratio(own, other):.2f}"


def ratio(own: Entry, other: Entry) -> float:
    """Returns the ratio of two medians."""
    result: float = own["seconds"]["median"] / other["seconds"]["median"]
    return result


def _cpu(entry: Entry | None, more: float = 0) -> str:
    value = None if entry is None else entry["cpu_seconds_per_gb"]
    return "-" if value is None else f"{value + more:.2f}"


def _other_work(report: dict[str, Any]) -> str:
    cores = [world["other_work_cores"] for world in report["worlds"]]
    return f"other work took {max(cores):.2f} cores at most."


def _idle(report: dict[str, Any]) -> str:
    found = [
        backend["idle_cores_of_a_sidecar"]
        for world in report["worlds"]
        for backend in world["backends"].values()
        if "idle_cores_of_a_sidecar" in backend
    ]
    return f" An idle sidecar took {max(found):.2%} of a core at most." if found else ""
