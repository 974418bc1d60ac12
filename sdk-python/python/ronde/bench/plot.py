"""Plots all-reduce: time by size for each backend, and ronde's ratio to its peers below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.bench.cases import World, size_text
from ronde.bench.errors import BenchError
from ronde.bench.groups import LABELS
from ronde.bench.machine import title as machine_title
from ronde.bench.table import ratio, series_label

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

COLLECTIVE = "allreduce"
# Okabe and Ito's colours, which are distinct for any colour vision; marker shapes repeat the distinction.
STYLES = {
    ("ronde", "in place"): ("#0072B2", "o"),
    ("ronde", "new"): ("#56B4E9", "s"),
    ("ronde", "shared"): ("#CC79A7", "v"),
    ("gloo", "in place"): ("#D55E00", "^"),
    ("mpi", "in place"): ("#009E73", "D"),
}


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Writes a PNG. Raises BenchError if there is no all-reduce to draw, or no matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BenchError("the plot needs matplotlib: pip install matplotlib") from error
    worlds = [(world, _cases(world)) for world in report["worlds"]]
    worlds = [(world, cases) for world, cases in worlds if cases]
    if not worlds:
        raise BenchError("there is no all-reduce in this report, and nothing else is drawn")
    figure, axes = pyplot.subplots(
        2,
        len(worlds),
        figsize=(4.2 * len(worlds) + 1, 6.5),
        sharex=True,
        sharey="row",
        squeeze=False,
        height_ratios=(2, 1),
        layout="constrained",
    )
    for column, (world, cases) in enumerate(worlds):
        upper, lower = axes[0][column], axes[1][column]
        upper.set_title(f"all-reduce, {World(world['hosts'], world['ranks']).title()}")
        _draw_times(upper, cases)
        _draw_ratios(lower, cases)
        sizes = [case["bytes"] for case in cases]
        lower.set_xticks(sizes, [size_text(size) for size in sizes], rotation=60)
        lower.minorticks_off()
    axes[0][0].set_ylabel("time (s), median and quartiles")
    axes[0][0].legend()
    axes[1][0].set_ylabel("ronde / peer")
    axes[1][0].legend()
    figure.suptitle(machine_title(report["machine"]), fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _cases(world: dict[str, Any]) -> list[dict[str, Any]]:
    return [case for case in world["cases"] if case["collective"] == COLLECTIVE]


def _draw_times(axes: Any, cases: Sequence[dict[str, Any]]) -> None:
    for key, (colour, marker) in STYLES.items():
        found = [(case["bytes"], entry) for case in cases for entry in case["entries"] if _key(entry) == key]
        if not found:
            continue
        sizes = [size for size, _ in found]
        seconds = [entry["seconds"] for _, entry in found]
        axes.plot(sizes, [one["median"] for one in seconds], color=colour, marker=marker, label=_label(found[0][1]))
        axes.fill_between(
            sizes,
            [one["lower_quartile"] for one in seconds],
            [one["upper_quartile"] for one in seconds],
            color=colour,
            alpha=0.2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _draw_ratios(axes: Any, cases: Sequence[dict[str, Any]]) -> None:
    for key, (colour, marker) in STYLES.items():
        found = []
        for case in cases:
            by_key = {_key(entry): entry for entry in case["entries"]}
            own = by_key.get(("ronde", "in place"))
            if own is not None and key in by_key and key[0] != "ronde":
                found.append((case["bytes"], ratio(own, by_key[key])))
        if found:
            axes.plot(*zip(*found), color=colour, marker=marker, label=f"to {LABELS[key[0]]}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _key(entry: dict[str, Any]) -> tuple[str, str]:
    return entry["backend"], entry["variant"]


def _label(entry: dict[str, Any]) -> str:
    return series_label(entry, is_only=entry["backend"] != "ronde")
