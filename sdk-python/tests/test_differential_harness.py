"""The differential tests find planted faults: a wrong bit, an error, a hang, a process that ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import ronde_binary

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from differential import worlds
from differential.duel import Duel

PROGRAM: dict[str, Any] = {
    "kind": "c10d",
    "seed": 5,
    "group": 0,
    "steps": [
        {"call": "all_reduce", "tensor": {"dtype": "int64", "shape": [3]}, "op": "SUM", "mode": "sync"},
    ],
}


def planted(kind: str, **more: Any) -> dict[str, Any]:
    """The program with a fault on rank 1 of ronde's world."""
    return {**PROGRAM, "sabotage": {"kind": kind, "rank": 1, "backend": "ronde", **more}}


def test_planted_errors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ronde_binary()
    with Duel(2) as duel:
        assert not duel.compare(PROGRAM)
        [bit, _] = duel.compare(planted("value", name="0.tensor"))
        assert (bit.what, bit.rank, bit.step) == ("values", 1, 0), bit
        [error] = duel.compare(planted("error"))
        assert (error.what, error.rank) == ("error", 1), error
        assert "planted" in str(error)
        [death] = duel.compare(planted("death"))
        assert (death.what, death.rank) == ("died", 1), death
        assert not duel.compare(PROGRAM), "the processes were not replaced"
        with monkeypatch.context() as patch:
            # Long enough for the other ranks to report, and below the timeout of groups.
            patch.setattr(worlds, "PROGRAM_TIMEOUT_S", 20.0)
            [hang] = duel.compare(planted("hang"))
        assert (hang.what, hang.rank) == ("hung", 1), hang
        assert "sabotaged" in str(hang), "the report has no stack of the rank that hangs"
        assert not duel.compare(json.loads(json.dumps(PROGRAM)))
        assert duel.tally.different == 4
        assert duel.tally.replaced["ronde"] == 2
