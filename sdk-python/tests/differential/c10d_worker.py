"""Runs programs of `torch.distributed` on one rank."""

from __future__ import annotations

import datetime
import os
import pathlib
from typing import Any

import torch
import torch.distributed as dist

from differential.c10d_calls import CALLS, Step
from differential.tensors import packed

# After which an operation of a group fails. Long enough for a loaded machine, and below the parent's own limit.
GROUP_TIMEOUT_S = 60.0
# What is written over tensors whose operations nobody waited for.
OVERWRITTEN = 3


def groups_of(size: int) -> list[list[int]]:
    """The groups that programs choose from, by number; the first is the default group."""
    everybody = list(range(size))
    pairs = [[low, high] for high in everybody for low in range(high)] if size > 2 else []
    return [everybody, everybody, *pairs, [size - 1]]


class Rank:
    """This process as a rank of `torch.distributed`."""

    def __init__(self, backend: str, size: int, folder: str) -> None:
        self.backend, self.size, self.folder = backend, size, pathlib.Path(folder)
        self.rank = -1
        self._rounds = 0
        self._groups: list[Any] = []

    def begin(self, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Makes the process groups."""
        timeout = datetime.timedelta(seconds=timeout_s)
        if self.backend == "gloo":
            store = dist.FileStore(str(self.folder / f"store-{self._rounds}"), self.size)
            rank = int(os.environ["DIFFERENTIAL_RANK"])
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size, timeout=timeout)
            new_group: Any = dist.new_group
        else:
            import ronde.torch.distributed as backend

            backend.init_process_group(timeout)
            new_group = backend.new_group
        self._rounds += 1
        self.rank = dist.get_rank()
        groups = groups_of(self.size)
        self._groups = [None, *(new_group(ranks, timeout=timeout) for ranks in groups[1:])]

    def reset(self, timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Makes new process groups in place of those that an error may have left in disorder."""
        dist.destroy_process_group()
        self.begin(timeout_s)

    def run(self, program: dict[str, Any]) -> dict[str, Any]:
        """What this rank sees of a program."""
        if self.rank not in groups_of(self.size)[program["group"]]:
            return {"steps": [], "values": {}, "after": {}}
        return _Run(self.rank, self._groups, program).report()


class _Run:
    """One program on one rank."""

    def __init__(self, rank: int, groups: list[Any], program: dict[str, Any]) -> None:
        self.rank, self.groups, self.program = rank, groups, program
        self.group = groups[program["group"]]
        self.steps: dict[int, Step] = {}
        self.outcomes: list[dict[str, Any]] = []
        self.late: list[tuple[dict[str, Any], Any]] = []

    def report(self) -> dict[str, Any]:
        """Performs all steps, up to the first that fails."""
        values: dict[str, Any] = {}
        after: dict[str, Any] = {}
        order = self.program.get("orders", {}).get(str(self.rank), range(len(self.program["steps"])))
        if all(self._perform(index) for index in order) and self._finish():
            values = self._watched()
            if any(step.is_never for step in self.steps.values()):
                self._overwrite()
                after = self._watched()
        return {"steps": self.outcomes, "values": values, "after": after}

    def _perform(self, index: int) -> bool:
        """Performs a step, of which this rank may not be a member; whether that went well."""
        given = self.program["steps"][index]
        fields = {**given, **given.get("by_rank", {}).get(str(self.rank), {})}
        number = fields.get("group", self.program["group"])
        members = groups_of(dist.get_world_size())[number]
        outcome: dict[str, Any] = {"call": fields["call"]}
        self.outcomes.append(outcome)
        if self.rank not in members:
            return True
        step = Step(fields, (self.program["seed"], index), self.rank, self.groups[number], members)
        self.steps[index] = step
        try:
            work = CALLS[fields["call"]](step)
            outcome["returned"] = type(work).__name__ if not isinstance(work, dist.Work) else "Work"
            if isinstance(work, torch.Future):
                work.wait()
            if isinstance(work, dist.Work):
                self._follow(outcome, work, fields["mode"])
        except Exception as error:
            outcome["error"] = failure(error)
            return False
        outcome["found"] = step.found
        return True

    def _follow(self, outcome: dict[str, Any], work: Any, mode: str) -> None:
        if mode == "wait":
            observe(outcome, work)
        elif mode == "late":
            self.late.append((outcome, work))

    def _finish(self) -> bool:
        """Waits for what is in flight; whether all of it went well."""
        if self.program.get("order") == "lifo":
            self.late.reverse()
        for outcome, work in self.late:
            try:
                observe(outcome, work)
            except Exception as error:
                outcome["error"] = failure(error)
                return False
        if self.program.get("wrong"):
            return True
        try:
            dist.barrier(group=self.group)
        except Exception as error:
            self.outcomes.append({"call": "final barrier", "error": failure(error)})
            return False
        return True

    def _overwrite(self) -> None:
        """Writes over what nobody waited for, and lets other operations pass."""
        with torch.no_grad():
            for step in self.steps.values():
                for tensor in step.watched.values():
                    if step.is_never and not tensor.is_sparse:
                        tensor.fill_(OVERWRITTEN)
        for _ in range(2):
            dist.all_reduce(torch.ones(3), group=self.group)
        dist.barrier(group=self.group)

    def _watched(self) -> dict[str, Any]:
        return {
            f"{index}.{name}": packed(tensor)
            for index, step in self.steps.items()
            for name, tensor in step.watched.items()
        }


def observe(outcome: dict[str, Any], work: Any) -> None:
    """Waits for a Work and records its state afterwards."""
    outcome["waited"] = work.wait()
    outcome["is_completed"] = work.is_completed()
    try:
        future = work.get_future()
    except Exception as error:
        outcome["future"] = failure(error)["kind"]
        return
    future.wait()
    outcome["future"] = {"done": future.done(), "value": nested(future.value())}


def nested(value: Any) -> Any:
    """A future's value: tensors as they are packed, lists as lists."""
    if isinstance(value, torch.Tensor):
        return packed(value)
    return [nested(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)


def failure(error: Exception) -> dict[str, Any]:
    """An exception as the parent reads it."""
    kind = [each.__name__ for each in type(error).__mro__ if each not in (object, BaseException, Exception)]
    return {"kind": kind, "text": f"{type(error).__name__}: {error}"[:2_000]}
