"""The measurements of the tests with faults, and the table of docs/OPERATIONS.md that is made from them.

python3 tests/containers/table.py      writes the table of the last `make compose-test` into the document
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "OPERATIONS.md"
BEGIN, END = "<!-- faults: made by tests/containers/table.py; do not edit -->", "<!-- end of faults -->"
# All of them must exist before the document may change.
FAULTS = 6


@dataclasses.dataclass
class Row:
    """A fault and its effects; times in seconds."""

    fault: str
    outcome: str
    # From the fault until a sidecar's status names the silent one.
    suspected: float | None
    # From the fault until each worker's error.
    errors: list[float] | None
    # From the end of the fault until the next step.
    resumed: float | None

    def text(self) -> str:
        """The line of the table."""
        named = f"{self.suspected:.1f} s" if self.suspected is not None else "-"
        errors = "-"
        if self.errors:
            errors = f"{statistics.median(self.errors):.2f} s, {max(self.errors):.2f} s"
        resumed = f"{self.resumed:.2f} s" if self.resumed is not None else "-"
        return f"| {self.fault} | {self.outcome} | {named} | {errors} | {resumed} |"


def measurements() -> pathlib.Path:
    """Where they are stored between the test and the document."""
    cache = pathlib.Path(os.environ.get("RONDE_CACHE") or pathlib.Path.home() / ".cache" / "ronde")
    return cache / "faults.json"


def write(rows: list[Row]) -> None:
    """Stores a measurement, and prints it."""
    print("\n" + "\n".join(row.text() for row in rows), file=sys.stderr)
    if len(rows) == FAULTS:
        measurements().parent.mkdir(parents=True, exist_ok=True)
        measurements().write_text(json.dumps([dataclasses.asdict(row) for row in rows]))


def main() -> int:
    """Writes the table into the document."""
    rows = [Row(**row) for row in json.loads(measurements().read_text())]
    titles = "| fault | effect | reported as silent after | errors after: median, last | continues within |"
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{DOCUMENT} has no place for the table, between {BEGIN} and {END}")
    table = "\n".join([titles, "|---|---|---|---|---|", *(row.text() for row in rows)])
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
