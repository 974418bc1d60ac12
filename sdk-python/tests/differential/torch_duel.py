"""Runs programs of `ronde.torch` in a world and compares with one process that computes all ranks."""

from __future__ import annotations

import time
from typing import Any

import torch

from differential import torch_reference, torch_training
from differential.c10d_worker import GROUP_TIMEOUT_S, failure, groups_of
from differential.comparison import Difference, Program, same, tolerance
from differential.duel import Tally
from differential.tensors import packed, unpacked
from differential.worlds import World

# Of trained parameters, where gradients travelled in float16.
CAST_TOLERANCE = (3e-2, 3e-2)
# Of LBFGS, whose inverse Hessian amplifies the rounding of sums in another order, from 1e-16 up to 3e-11.
LBFGS_TOLERANCE = (1e-7, 1e-9)


class TorchDuel:
    """A world of ronde, and this process."""

    def __init__(self, ranks: int, sidecars: int = 1) -> None:
        self.ranks = ranks
        self.ronde = World("torch", ranks, sidecars)
        self.tally = Tally()

    def __enter__(self) -> TorchDuel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.ronde.stop()

    def compare(self, program: Program) -> list[Difference]:
        """What differs."""
        start = time.monotonic()
        reports = self.ronde.run(program)
        found = self._differences(program, reports)
        is_gone = any(report.keys() & {"hung", "died"} for report in reports)
        self.tally.replaced["ronde"] += is_gone
        if not is_gone and any("error" in report for report in reports):
            self.ronde.run({"kind": "reset", "timeout_s": GROUP_TIMEOUT_S})
        name = program.get("call") or program["optimizer"]
        self.tally.count({"steps": [{"call": program["kind"], "form": name}]}, bool(found), time.monotonic() - start)
        return found

    def _differences(self, program: Program, reports: list[dict[str, Any]]) -> list[Difference]:
        fields = {"call": program["kind"], "form": program.get("call") or program["optimizer"]}
        wanted = self._wanted(program)
        failures = [
            Difference(what, rank, 0, fields, report.get(what), other.get(what))
            for rank, (report, other) in enumerate(zip(reports, wanted))
            for what in ("hung", "died", "error")
            if (what in report) != (what in other)
        ]
        if failures or any("error" in report for report in reports):
            return failures
        if program.get("call") == "batch_norm" and program["affine"] and program["orders"] > 1:
            _add_up_parameters(reports), _add_up_parameters(wanted)
        widened = LBFGS_TOLERANCE if program.get("optimizer") == "LBFGS" else None
        if program.get("compression") == "fp16":
            widened = CAST_TOLERANCE
        found = []
        for rank, (mine, other) in enumerate(zip(reports, wanted)):
            for what in sorted(mine.keys() | other.keys()):
                with tolerance(widened):
                    if not same(mine.get(what), other.get(what)):
                        found.append(_narrowed(what, rank, fields, mine.get(what), other.get(what)))
        return found

    def _wanted(self, program: Program) -> list[dict[str, Any]]:
        """What ranks should report; where the one process raises, all of them should."""
        members = groups_of(self.ranks)[program["group"]]
        if program["kind"] == "gradcheck":
            return [{"checked": True} if rank in members else {} for rank in range(self.ranks)]
        try:
            if program["kind"] == "training":
                return torch_training.in_one_process(program, self.ranks)
            return torch_reference.reference(program, self.ranks)
        except Exception as error:  # such as an optimizer's, that does not take what it is given
            return [{"error": failure(error)}] * self.ranks


def _add_up_parameters(reports: list[dict[str, Any]]) -> None:
    """Adds up second gradients of weight and bias over ranks, as all gradients of parameters are.

    Each rank's is another share of the sum, as statistics of all ranks are multiplied by the rank's own weight.
    """
    for place in (1, 2):
        parts = [unpacked(report["second"][place]) for report in reports]
        for report in reports:
            report["second"][place] = packed(torch.stack(parts).sum(0))


def _narrowed(what: str, rank: int, fields: dict[str, Any], mine: Any, other: Any) -> Difference:
    """The difference, with of a dict no more than what differs."""
    if isinstance(mine, dict) and isinstance(other, dict):
        names = [name for name in sorted(mine.keys() | other.keys()) if not same(mine.get(name), other.get(name))]
        mine, other = ({name: each.get(name) for name in names[:3]} for each in (mine, other))
    return Difference(what, rank, 0, fields, mine, other)
