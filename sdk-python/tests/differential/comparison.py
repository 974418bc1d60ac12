"""Compares what the ranks of two worlds report of the same program."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from differential.model import expected
from differential.tensors import unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator

Program = dict[str, Any]
Report = dict[str, Any]

# Relative and absolute: results of a few additions in another order, and of sums in another precision.
TOLERANCES = {
    "float64": (1e-10, 1e-12),
    "complex128": (1e-10, 1e-12),
    "float32": (1e-4, 1e-5),
    "complex64": (1e-4, 1e-5),
    "float16": (1e-2, 1e-2),
    "bfloat16": (5e-2, 5e-2),
    "float8_e4m3fn": (0.3, 0.3),
}

# How much of the relative tolerance, of the largest element of a tensor, is allowed for every element.
ROUNDING_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference between one rank of ronde and the reference.

    what   -- "hung", "died", "error", "unraised" where the reference alone fails, "values", "after", "model" where
              values are not those of the model, or the name of what a call has returned
    step   -- its number in the program, and None for the whole program
    fields -- of the step, as this rank has performed it
    """

    what: str
    rank: int
    step: int | None
    fields: dict[str, Any]
    ronde: Any
    reference: Any

    @property
    def signature(self) -> tuple[str, ...]:
        """A signature of differences that are likely to have one cause."""
        parts = [self.what, *(str(self.fields.get(key, "")) for key in ("call", "form", "fault"))]
        if self.what == "error":
            parts += [_raised(self.ronde)[0], _raised(self.reference)[0]]
        return tuple(parts)

    def __str__(self) -> str:
        what = self.fields.get("call", "program")
        if self.fields.get("form"):
            what = f"{what} ({self.fields['form']})"
        return (
            f"{what}, step {self.step}, rank {self.rank}: {self.what}\n    ronde:     {_shown(self.ronde)}\n"
            f"    reference: {_shown(self.reference)}"
        )


def differences(program: Program, ronde: list[Report], reference: list[Report]) -> list[Difference]:
    """All differences between the reports of two worlds, by rank and step."""
    ends = [
        Difference(what, rank, None, {}, report[what], "the reference")
        for rank, report in enumerate(ronde)
        for what in ("hung", "died")
        if what in report
    ]
    if ends:
        return ends
    if any(report.keys() & {"hung", "died"} for report in reference):
        return _errors_anywhere(program, ronde)
    if program.get("wrong") == "some":
        raised = next((text for report in reference if (text := _first_error(report))), None)
        if raised is not None:
            return _errors_anywhere(program, ronde, raised)
    found: list[Difference] = []
    for rank, (mine, other) in enumerate(zip(ronde, reference)):
        found += _of_rank(program, rank, mine, other)
    found += _from_model(program, ronde)
    # What follows from an error elsewhere is of no interest.
    return [each for each in found if each.what == "error"] or found


def _errors_anywhere(program: Program, ronde: list[Report], reference: str = "it ended") -> list[Difference]:
    """Where the reference fails on some ranks, ronde does so on some; with values nobody can count on none."""
    if any(_first_error(report) for report in ronde):
        return []
    last = len(program["steps"]) - 1
    return [Difference("unraised", 0, last, program["steps"][last], "no rank raised", reference)]


def _first_error(report: Report) -> str | None:
    return next((step["error"]["text"] for step in report.get("steps", []) if "error" in step), None)


def _first_error_step(report: Report) -> int | None:
    return next((position for position, step in enumerate(report["steps"]) if "error" in step), None)


def _of_rank(program: Program, rank: int, mine: Report, other: Report) -> list[Difference]:
    found: list[Difference] = []
    order = program.get("orders", {}).get(str(rank), range(len(program["steps"])))

    def note(what: str, position: int, ronde: Any, reference: Any) -> None:
        steps = program["steps"]
        step = order[position] if position < len(steps) else position
        given = steps[step] if step < len(steps) else {"call": "final barrier"}
        fields = {**given, **given.get("by_rank", {}).get(str(rank), {})}
        found.append(Difference(what, rank, step, fields, ronde, reference))

    errors = [_first_error_step(report) for report in (mine, other)]
    if any(position is not None for position in errors):
        # A wait may raise what elsewhere the call does, so the number of the step may differ.
        if None in errors:
            position = next(each for each in errors if each is not None)
            ours, theirs = (_step(report, position) or {} for report in (mine, other))
            note("error", position, ours.get("error"), theirs.get("error"))
        return found
    for position, (ours, theirs) in enumerate(zip(mine["steps"], other["steps"])):
        for what in ("returned", "waited", "is_completed", "future", "found"):
            if not same(ours.get(what), theirs.get(what)):
                note(what, position, ours.get(what), theirs.get(what))
    if not found:
        for what in ("values", "after"):
            for name in sorted(mine[what].keys() | other[what].keys()):
                one, another = mine[what].get(name), other[what].get(name)
                if not same(one, another):
                    note(what, list(order).index(int(name.split(".")[0])), one, another)
    return found


def _from_model(program: Program, ronde: list[Report]) -> list[Difference]:
    """Where a program that went well on all ranks has other values than it should."""
    if program.get("wrong") or any(_first_error(report) for report in ronde):
        return []
    found = []
    for rank, (mine, wanted) in enumerate(zip(ronde, expected(program, len(ronde)))):
        for what in ("values", "after"):
            for name in sorted(mine[what].keys() & wanted[what].keys()):
                if not same(mine[what][name], wanted[what][name]):
                    step = int(name.split(".")[0])
                    fields = {**program["steps"][step], **program["steps"][step].get("by_rank", {}).get(str(rank), {})}
                    found.append(Difference("model", rank, step, fields, mine[what][name], wanted[what][name]))
    return found


def _step(report: Report, position: int) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = report["steps"]
    return steps[position] if position < len(steps) else None


_widened: list[tuple[float, float]] = []


@contextlib.contextmanager
def tolerance(pair: tuple[float, float] | None) -> Iterator[None]:
    """Compares within these relative and absolute tolerances, whatever the type; without them as ever."""
    if pair is not None:
        _widened.append(pair)
    try:
        yield
    finally:
        if pair is not None:
            _widened.pop()


def same(one: Any, other: Any) -> bool:
    """Whether results are equal; tensors within what their type allows, integers bit by bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        if ("data" in one or "sparse" in one) and one.keys() == other.keys():
            return same_tensors(unpacked(one), unpacked(other))
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(mine, its) for mine, its in zip(one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isfinite(one):
        # Of float64, which ranks may add up in another order.
        return math.isclose(one, other, rel_tol=TOLERANCES["float64"][0], abs_tol=TOLERANCES["float64"][1])
    return bool(one == other)


def same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have one type, one shape, and elements that are as equal as the type allows."""
    if (one.dtype, one.shape, one.is_sparse) != (other.dtype, other.shape, other.is_sparse):
        return False
    one, other = (each.to_dense() if each.is_sparse else each for each in (one, other))
    tolerances = TOLERANCES.get(str(one.dtype).removeprefix("torch."))
    if tolerances is None:
        return torch.equal(one, other)
    relative, absolute = _widened[-1] if _widened else tolerances
    if one.dtype.is_complex:
        # Part by part: next to an infinite part the distance of two numbers is not a number.
        one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
    one, other = one.to(torch.float64), other.to(torch.float64)
    # An element that is a difference of large ones has their rounding errors.
    finite = other[other.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(one, other, relative, max(absolute, relative * ROUNDING_SHARE * largest), equal_nan=True)


def _raised(value: Any) -> tuple[str, str]:
    if isinstance(value, dict) and "kind" in value:
        return value["kind"][0], value["text"]
    return ("nothing", "") if value is None else ("", str(value))


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "data" in value:
        return str(unpacked(value))[:400]
    if isinstance(value, dict) and "text" in value:
        return str(value["text"])[:400]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_shown(each) for each in value) + "]"
    return "no error" if value is None else str(value)[:1_500]
