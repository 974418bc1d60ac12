"""Plots collectives: time by size, beside it the ratio to peers (a PNG) or the bus bandwidth (SVG of a page)."""

from __future__ import annotations

import io
import itertools
import re
from typing import TYPE_CHECKING, Any

from ronde.bench.cases import World, size_text
from ronde.bench.errors import BenchError, OutputError, UsageError
from ronde.bench.groups import LABELS
from ronde.bench.machine import title as machine_title
from ronde.bench.table import ratio, series_label

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Sequence

COLLECTIVE = "allreduce"
# Okabe and Ito's colours, which are distinct for any colour vision; marker shapes repeat the distinction.
STYLES = {
    ("ronde", "in place"): ("#0072B2", "o"),
    ("ronde", "new"): ("#56B4E9", "s"),
    ("ronde", "shared"): ("#CC79A7", "v"),
    ("ronde", "into"): ("#0072B2", "o"),
    ("gloo", "in place"): ("#D55E00", "^"),
    ("gloo", "into"): ("#D55E00", "^"),
    ("mpi", "in place"): ("#009E73", "D"),
    ("mpi", "into"): ("#009E73", "D"),
}
# Of codecs and reducers, whose variants have names of their own.
OTHER_STYLES = (("#E69F00", "P"), ("#8C8C00", "X"), ("#7F7F7F", "<"), ("#B07AA1", ">"))
# Axes and words are drawn in this colour, for which a page has its own.
INK = "#010203"


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Writes a PNG.

    Raises UsageError if there is no all-reduce to draw, BenchError without matplotlib, and OutputError.
    """
    pyplot = _pyplot()
    worlds = [(world, _cases(world, COLLECTIVE)) for world in report["worlds"]]
    worlds = [(world, cases) for world, cases in worlds if cases]
    if not worlds:
        raise UsageError("there is no all-reduce in this report, and nothing else is drawn")
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
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}") from error
    pyplot.close(figure)


def svg(world: dict[str, Any], collective: str) -> str:
    """Draws time and bus bandwidth by size as an SVG element whose axes have the colour of the page's text."""
    pyplot = _pyplot()
    cases = _cases(world, collective)
    text = io.StringIO()
    with pyplot.rc_context({**_INKED, "svg.hashsalt": collective, "svg.fonttype": "none"}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), sharex=True, layout="constrained")
        _draw_times(left, cases)
        left.set_ylabel("time (s), median and quartiles")
        _draw_quantity(right, cases, lambda case, seconds: bus_bandwidth(case, world["ranks"], seconds) / 1e9)
        right.set_ylabel("bus bandwidth (GB/s)")
        right.set_ylim(bottom=0)
        right.grid(alpha=0.3)
        sizes = [case["bytes"] for case in cases]
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=60)
            axes.minorticks_off()
        left.legend(framealpha=0)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    # A page holds the element, without the head of a document.
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    return drawn.replace(INK, "currentColor")


def bus_bandwidth(case: dict[str, Any], ranks: int, seconds: float) -> float:
    """Bytes a second on the busiest link of a ring, which can be compared between numbers of ranks.

    Time by the larger of input and result, corrected as nccl-tests does: each rank of an all-reduce sends
    2 (n - 1) / n of it, of the others (n - 1) / n, and a broadcast passes all of it on.
    """
    share = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(case["collective"], (ranks - 1) / ranks)
    result: float = case["bytes"] * share / seconds
    return result


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BenchError("the plot needs matplotlib: pip install matplotlib") from error
    return pyplot


def _cases(world: dict[str, Any], collective: str) -> list[dict[str, Any]]:
    return [case for case in world["cases"] if case["collective"] == collective]


def _styles(cases: Sequence[dict[str, Any]]) -> dict[tuple[str, str], tuple[str, str]]:
    """The colour and marker of each backend and variant that was measured."""
    found = dict.fromkeys(_key(entry) for case in cases for entry in case["entries"])
    others = itertools.cycle(OTHER_STYLES)
    known = {key: style for key, style in STYLES.items() if key in found}
    return {**known, **{key: next(others) for key in found if key not in STYLES}}


def _draw_times(axes: Any, cases: Sequence[dict[str, Any]]) -> None:
    _draw_quantity(axes, cases, lambda _, seconds: seconds)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _draw_quantity(
    axes: Any, cases: Sequence[dict[str, Any]], quantity: Callable[[dict[str, Any], float], float]
) -> None:
    for key, (colour, marker) in _styles(cases).items():
        found = [(case, entry) for case in cases for entry in case["entries"] if _key(entry) == key]
        sizes = [case["bytes"] for case, _ in found]
        middle, low, high = (
            [quantity(case, entry["seconds"][which]) for case, entry in found]
            for which in ("median", "lower_quartile", "upper_quartile")
        )
        axes.plot(sizes, middle, color=colour, marker=marker, label=_label(found[0][1]))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.2)


def _draw_ratios(axes: Any, cases: Sequence[dict[str, Any]]) -> None:
    for key, (colour, marker) in _styles(cases).items():
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


# What matplotlib draws in a colour of its own otherwise.
_INKED = dict.fromkeys(
    ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
)
