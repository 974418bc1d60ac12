"""The accepted differences from Gloo, each with its reason. Any other difference is a failure."""

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
    """An operation that ronde performs and Gloo rejects with this message."""

    def matches(program: Program, difference: Difference) -> bool:
        if difference.what != "error" or difference.ronde is not None:
            return False
        refusal = difference.reference["text"]
        return any(each in refusal for each in phrases)

    return matches


def _gloo_refuses_empty_messages(program: Program, difference: Difference) -> bool:
    """The receiver's buffer has no bytes, which Gloo takes for an error; the sender then waits until its timeout."""
    fields = difference.fields
    messages = fields.get("messages", []) if fields.get("call") == "messages" else []
    is_empty = any(0 in each["tensor"]["shape"] for each in messages)
    return is_empty and _gloo_refuses("offset < this->size", "Timed out waiting")(program, difference)


def _is_layout(program: Program, difference: Difference) -> bool:
    """Values of non-contiguous tensors, where the model confirms ronde's."""
    is_value = difference.what in ("values", "after", "future")
    return is_value and bool(layouts(difference.fields) - {"rows", "offset", "part"})


def layouts(fields: Any) -> set[str]:
    """All layouts in a step."""
    if isinstance(fields, dict):
        own = {fields["layout"]} if "layout" in fields else set()
        return own.union(*(layouts(each) for each in fields.values()))
    return set().union(*(layouts(each) for each in fields)) if isinstance(fields, list) else set()


def _is_unseen(*dtypes: str, op: str = "") -> Callable[[Program, Difference], bool]:
    """Values of an operation whose error Gloo did not report, because no thread waited for it."""

    def matches(program: Program, difference: Difference) -> bool:
        fields = difference.fields
        is_value = difference.what in ("values", "after") and fields.get("mode") == "never"
        return is_value and bool(types(fields) & set(dtypes)) and op in ("", fields.get("op"))

    return matches


def _both_refuse_unseen(program: Program, difference: Difference) -> bool:
    """A reduction of a type that is only moved. Nobody waited for it, so Gloo's refusal is not seen."""
    is_unseen = difference.what == "error" and difference.reference is None and difference.fields.get("mode") == "never"
    return is_unseen and "only moved, not reduced" in str(difference.ronde)


def types(fields: Any) -> set[str]:
    """All types of tensors in a step."""
    if isinstance(fields, dict):
        own = {fields["dtype"]} if "dtype" in fields else set()
        return own.union(*(types(each) for each in fields.values()))
    return set().union(*(types(each) for each in fields)) if isinstance(fields, list) else set()


def _either(*rules: Callable[[Program, Difference], bool]) -> Callable[[Program, Difference], bool]:
    return lambda program, difference: any(rule(program, difference) for rule in rules)


def _is_differentiable_in_group(program: Program, difference: Difference) -> bool:
    is_of_roots = difference.fields.get("form") in ("all_to_all", "all_gather")
    return is_of_roots and _gloo_refuses("is not part of group")(program, difference)


def _is_reduce(program: Program, difference: Difference) -> bool:
    return difference.what in ("values", "after", "future") and difference.fields["call"] == "reduce"


def _is_nan(program: Program, difference: Difference) -> bool:
    """Extremes of elements that may not be numbers: the model has found ronde's to be right."""
    is_value = difference.what in ("values", "after", "future", "found")
    return is_value and difference.fields.get("op") in ("MIN", "MAX") and "special" in str(difference.fields)


def _is_disagreement(program: Program, difference: Difference) -> bool:
    """One rank's arguments do not fit those of the others, and Gloo does not notice."""
    is_raised = difference.what == "error" and difference.reference is None
    return program.get("wrong") == "some" and is_raised


def _is_empty_disagreement(program: Program, difference: Difference) -> bool:
    """No rank's tensors have elements, so no element can be misplaced."""
    found = shapes(difference.fields)
    is_disagreement = difference.what == "unraised" and program.get("wrong") == "some"
    return is_disagreement and bool(found) and all(0 in shape for shape in found)


def shapes(fields: Any) -> list[list[int]]:
    """All shapes of tensors in a step."""
    if isinstance(fields, dict):
        own = [fields["shape"]] if "shape" in fields else []
        return own + [shape for each in fields.values() for shape in shapes(each)]
    return [shape for each in fields for shape in shapes(each)] if isinstance(fields, list) else []


def _is_complex(program: Program, difference: Difference) -> bool:
    """A reduction that Gloo performs on real and imaginary parts separately."""
    refusal = difference.ronde["text"] if difference.what == "error" and difference.ronde is not None else ""
    return "only summed and averaged" in refusal


def _is_work_of_reduce_scatter(program: Program, difference: Difference) -> bool:
    is_unseen = difference.what in ("values", "after") and difference.fields.get("mode") == "never"
    is_of_work = is_unseen or difference.what in ("is_completed", "future")
    return is_of_work and difference.fields["call"] in ("reduce_scatter_tensor", "reduce_scatter")


def _is_future_of_all_gather(program: Program, difference: Difference) -> bool:
    return difference.what == "future" and difference.fields["call"] == "all_gather_into_tensor"


INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "bool")

ACCEPTED: list[Accepted] = [
    Accepted(
        "types that Gloo lacks",
        "ronde moves and reduces int16 and uint16, moves float8, and gathers complex tensors; "
        "Gloo raises `Invalid scalar type`. Neither reduces float8: ronde raises at once, Gloo at `wait()`.",
        _either(
            _gloo_refuses("Invalid scalar type"),
            _is_unseen("int16", "uint16", "float8_e4m3fn", "complex64", "complex128"),
            _both_refuse_unseen,
        ),
    ),
    Accepted(
        "average of integers",
        "`AVG` of integers is truncated toward zero, as ronde's other interfaces do it; Gloo refuses it.",
        _either(_gloo_refuses("result type Float can't be cast"), _is_unseen(*INTEGERS, op="AVG")),
    ),
    Accepted(
        "shapes that differ within a list",
        "Lists of `all_gather`, `all_to_all` and `reduce_scatter`, and outputs of one tensor for all ranks, may have "
        "any shapes whose elements fit; Gloo wants one shape.",
        _gloo_refuses(
            "invalid tensor size at index",
            "Check failed: outputShape",
            "Check failed: outputs[0].sizes()",
            "doesn't match the broadcast shape",
            "input and output tensors must have the same size",
        ),
    ),
    Accepted(
        "messages without elements",
        "A tensor without elements is sent and received as any other; a receive from any rank fails with Gloo.",
        _gloo_refuses_empty_messages,
    ),
    Accepted(
        "layouts",
        "Tensors that are not contiguous are read and written element by element, and a conjugated view of a complex "
        "tensor by its own values. Gloo refuses some of them, and reads and writes others in the order of their memory "
        "and without the conjugation, which is wrong.",
        _either(_gloo_refuses("has to be contiguous"), _is_layout),
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
        "extremes and NaN",
        "`MIN` and `MAX` of elements of which one is NaN are NaN; with Gloo that depends on which rank has it.",
        _is_nan,
    ),
    Accepted(
        "ranks that disagree",
        "Ranks whose tensors differ in type or shape all raise MismatchError, which says who gave what; Gloo compares "
        "no types, and where sizes fit its result is undefined.",
        _is_disagreement,
    ),
    Accepted(
        "ranks that disagree about empty tensors",
        "Where no rank's tensors have elements, their shapes may differ: no element can be placed wrongly. Gloo raises "
        "in some collectives.",
        _is_empty_disagreement,
    ),
    Accepted(
        "complex tensors",
        "Complex tensors are summed and averaged; `reduce_scatter` by another operation raises, where Gloo reduces "
        "real and imaginary parts apart.",
        _is_complex,
    ),
    Accepted(
        "the Work of reduce_scatter",
        "The Work of `reduce_scatter` has a future, is complete after `wait()`, and later barriers come after its "
        "result; Gloo's has none, says that it is not, and a barrier does not wait for it.",
        _is_work_of_reduce_scatter,
    ),
    Accepted(
        "the future of all_gather_into_tensor",
        "The future of `all_gather_into_tensor` holds the output; that of Gloo holds its parts.",
        _is_future_of_all_gather,
    ),
    Accepted(
        "differentiable calls in a group",
        "`all_to_all` of `torch.distributed.nn.functional`, and the gradient of its `all_gather`, work in any group; "
        "with Gloo they are made of collectives whose roots are taken for ranks of the job, which fails in a group "
        "that does not begin at rank 0.",
        _is_differentiable_in_group,
    ),
]


def rendered() -> str:
    """The table as docs/PYTORCH.md has it."""
    rows = [f"| {each.name} | {each.text} |" for each in ACCEPTED]
    return "\n".join(["| what | difference and reason |", "|---|---|", *rows])


def reason_for(program: Program, difference: Difference) -> str | None:
    """The name of the accepted difference that this one is; None where it is a failure."""
    return next((each.name for each in ACCEPTED if each.matches(program, difference)), None)
