"""The table at the end of a run."""

from __future__ import annotations

from soak.processes import Usage
from soak.supervisor import Supervisor

# What may be in use more at the end than after the start: buffers that grow with the largest operation so far, and
# connections that are being replaced.
MEMORY_FACTOR, MEMORY_MB = 1.5, 32.0
DESCRIPTORS = 8


def usages(supervisor: Supervisor) -> list[tuple[int, Usage, Usage]]:
    """Of each sidecar that was measured twice: its host, what it had in use first, and at the end of the faults."""
    sidecars = enumerate(supervisor.job.sidecars)
    pairs = [(host, sidecar.first_usage, supervisor.last.get(host)) for host, sidecar in sidecars]
    return [(host, first, now) for host, first, now in pairs if first is not None and now is not None]


def has_grown(supervisor: Supervisor) -> bool:
    """Whether a sidecar has more in use than it should."""
    return any(
        now.memory_mb > first.memory_mb * MEMORY_FACTOR + MEMORY_MB or now.descriptors > first.descriptors + DESCRIPTORS
        for _, first, now in usages(supervisor)
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
    if not usages(supervisor):
        rows.append(("memory and descriptors", "not measured: the job was started again too shortly before the end"))
    for host, first, now in usages(supervisor):
        rows.append((f"sidecar {host}, its own memory", f"{first.memory_mb:.0f} MB, at the end {now.memory_mb:.0f} MB"))
        rows.append((f"sidecar {host}, descriptors", f"{first.descriptors}, at the end {now.descriptors}"))
    lines = ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    details = [*tally.hangs, *tally.wrong_culprits, *tally.wrong_elements]
    return "\n".join([*lines, *(f"- {text}" for text in details[:20])])
