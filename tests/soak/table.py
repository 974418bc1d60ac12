"""The table at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from soak.supervisor import Growth, Supervisor

# What may be in use more at the end than after the start: buffers and segments of shared memory that grow with the
# largest operation so far, and connections that are being replaced.
MEMORY_FACTOR, MEMORY_MB = 1.5, 32.0
DESCRIPTORS = 8


def has_grown(supervisor: Supervisor) -> bool:
    """Whether a sidecar has more in use than it should.

    A single first measurement may meet links and workers that are just being replaced. All sidecars do the same work,
    so the largest one counts for each.
    """
    growths = supervisor.growths()
    memory_mb = max((growth.first.memory_mb for growth in growths), default=0.0) * MEMORY_FACTOR + MEMORY_MB
    descriptors = max((growth.first.descriptors for growth in growths), default=0) + DESCRIPTORS
    return any(growth.last.memory_mb > memory_mb or growth.last.descriptors > descriptors for growth in growths)


def _usages(growths: list[Growth]) -> Iterator[tuple[str, str]]:
    """A row for each host: its sidecar that was measured for the longest time."""
    if not growths:
        yield "memory and descriptors", "not measured: no sidecar lived long enough"
    longest: dict[int, Growth] = {}
    for growth in sorted(growths, key=lambda growth: growth.seconds):
        longest[growth.host] = growth
    for host, growth in sorted(longest.items()):
        first, then = growth.first, growth.last
        yield (
            f"a sidecar on host {host}, at first and after {growth.seconds:.0f} s",
            f"{first.memory_mb:.0f} and {then.memory_mb:.0f} MB of its own, "
            f"{first.descriptors} and {then.descriptors} descriptors",
        )


def table(supervisor: Supervisor, seconds: float) -> str:
    """The whole table, in Markdown."""
    tally, totals = supervisor.tally, supervisor.totals()
    rows = [
        ("seconds", f"{seconds:.0f}"),
        ("operations, each counted on every rank", f"{totals['operations']:,}"),
        ("elements checked", f"{totals['elements']:,}"),
        ("epochs", str(tally.epochs)),
        *((f"fault: {name}", str(count)) for name, count in sorted(tally.faults.items())),
        ("**hangs**", str(len(tally.hangs))),
        ("**wrong elements**", str(totals["wrong"])),
        ("**wrong culprits**", str(len(tally.wrong_culprits))),
    ]
    rows.extend(_usages(supervisor.growths()))
    lines = ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    details = [*tally.hangs, *tally.wrong_culprits, *tally.wrong_elements]
    return "\n".join([*lines, *(f"- {text}" for text in details[:20])])
