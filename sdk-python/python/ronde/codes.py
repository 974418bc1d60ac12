"""The codes of errors, which `ronde explain` explains."""

from __future__ import annotations

# For each `cause` of a RondeError, its code: the table in sidecar/crates/bootstrap/src/codes/causes.rs.
CAUSES = {
    "bug": "RONDE-E317",
    "claim": "RONDE-E311",
    "closed": "RONDE-E313",
    "connect": "RONDE-E310",
    "device": "RONDE-E314",
    "limit": "RONDE-E308",
    "memory": "RONDE-E314",
    "mismatch": "RONDE-E306",
    "protocol": "RONDE-E315",
    "rank_lost": "RONDE-E301",
    "refused": "RONDE-E307",
    "settings": "RONDE-E310",
    "shut_down": "RONDE-E305",
    "sidecar_lost": "RONDE-E401",
    "start": "RONDE-E208",
    "thread": "RONDE-E314",
    "timed_out": "RONDE-E309",
    "timeline": "RONDE-E316",
    "token": "RONDE-E311",
    "used_after_fork": "RONDE-E312",
}
_PREFIX = "[RONDE-E"


def marked(text: str, code: str | None) -> str:
    """Returns the text with the code after its first line, unless that line has one, which is more specific."""
    first, newline, rest = text.partition("\n")
    if code is None or not first or _PREFIX in first:
        return text
    return f"{first} [{code}]{newline}{rest}"


def code_in(text: str) -> str | None:
    """Returns the code that the first line of a text has."""
    _, found, rest = text.partition("\n")[0].rpartition(_PREFIX)
    number = rest.partition("]")[0]
    return f"RONDE-E{number}" if found and number.isdigit() else None
