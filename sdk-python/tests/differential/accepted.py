"""The differences from Gloo that are known and meant, each with its reason. Any other is a failure."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

from differential.comparison import Difference

Program = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Accepted:
    """An accepted difference. Where it applies, values of ronde are still compared with those of the model.

    name    -- in tables of runs
    text    -- for users: what differs, and why; docs/PYTORCH.md has it
    matches -- whether a difference is of this kind
    """

    name: str
    text: str
    matches: Callable[[Program, Difference], bool]


def _gloo_refuses(*phrases: str) -> Callable[[Program, Difference], bool]:
    """An operation that ronde performs and Gloo refuses in these words."""

    def matches(program: Program, difference: Difference) -> bool:
        if difference.what != "error" or difference.ronde is not None:
            return False
        refusal = difference.reference["text"]
        return any(each in refusal for each in phrases)

    return matches


def _is_layout(program: Program, difference: Difference) -> bool:
    """Values of tensors that are not laid out in rows: the model has found ronde's to be right."""
    is_value = difference.what in ("values", "after", "future")
    return is_value and bool(layouts(difference.fields) - {"rows", "offset", "part"})


def layouts(fields: Any) -> set[str]:
    """All layouts in a step."""
    if isinstance(fields, dict):
        own = {fields["layout"]} if "layout" in fields else set()
        return own.union(*(layouts(each) for each in fields.values()))
    return set().union(*(layouts(each) for each in fields)) if isinstance(fields, list) else set()


def _is_reduce(program: Program, difference: Difference) -> bool:
    return difference.what in ("values", "after") and difference.fields["call"] == "reduce"


def _is_work_of_reduce_scatter(program: Program, difference: Difference) -> bool:
    calls = ("reduce_scatter_tensor", "reduce_scatter")
    return difference.what in ("is_completed", "future") and difference.fields["call"] in calls


def _is_future_of_all_gather(program: Program, difference: Difference) -> bool:
    return difference.what == "future" and difference.fields["call"] == "all_gather_into_tensor"


ACCEPTED: list[Accepted] = [
    Accepted(
        "types that Gloo lacks",
        "ronde moves and reduces int16 and uint16, and moves float8; Gloo raises `Invalid scalar type`.",
        _gloo_refuses("Invalid scalar type"),
    ),
    Accepted(
        "average of integers",
        "`AVG` of integers is truncated toward zero, as ronde's other interfaces do it; Gloo refuses it.",
        _gloo_refuses("result type Float can't be cast"),
    ),
    Accepted(
        "shapes that differ within a list",
        "Lists of `all_gather` and `all_to_all`, and outputs of one tensor for all ranks, may have any shapes whose "
        "elements fit; Gloo wants one shape.",
        _gloo_refuses("invalid tensor size at index", "invalid tensor type at index"),
    ),
    Accepted(
        "layouts",
        "Tensors that are not contiguous are read and written element by element. Gloo refuses some of them, and reads "
        "and writes others in the order of their memory, which places elements wrongly.",
        lambda program, difference: (
            _gloo_refuses("has to be contiguous")(program, difference) or _is_layout(program, difference)
        ),
    ),
    Accepted(
        "tensors that require a gradient",
        "A collective writes into a leaf that requires a gradient; Gloo refuses that in some collectives.",
        _gloo_refuses("a leaf Variable that requires grad"),
    ),
    Accepted(
        "elements after reduce",
        "`reduce` leaves the tensors of all ranks but the destination as they are; Gloo leaves partial results there.",
        _is_reduce,
    ),
    Accepted(
        "the Work of reduce_scatter",
        "The Work of `reduce_scatter` has a future and is complete after `wait()`; Gloo's has none and says that it is "
        "not.",
        _is_work_of_reduce_scatter,
    ),
    Accepted(
        "the future of all_gather_into_tensor",
        "The future of `all_gather_into_tensor` holds the output; that of Gloo holds its parts.",
        _is_future_of_all_gather,
    ),
]


def reason_for(program: Program, difference: Difference) -> str | None:
    """The name of the accepted difference that this one is; None where it is a failure."""
    return next((each.name for each in ACCEPTED if each.matches(program, difference)), None)
