"""`ronde bench keras` finds weights of ronde that are not those of the peer."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from ronde.bench.__main__ import main
from ronde.bench.errors import WrongResultError
from ronde.bench.keras import TOLERANCE, _compare

if TYPE_CHECKING:
    import pathlib

# Two weights, with their sampled values.
EXPECTED = [[0.5, -2.0, 0.0], [0.25]]


def test_weights_within_the_tolerance_are_accepted() -> None:
    _compare(EXPECTED, EXPECTED)
    # Relative to the largest value of a weight.
    off = 0.9 * TOLERANCE * 2.0
    _compare([[0.5 + off, -2.0, -off], [0.25]], EXPECTED)
    _compare([[0.0], []], [[0.0], []])


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1.1])
def test_a_wrong_value_is_found_wherever_it_is(at: int, wrong: float) -> None:
    values = [list(EXPECTED[0]), EXPECTED[1]]
    values[0][at] = wrong
    with pytest.raises(WrongResultError, match="weight 0 of ronde differs from that of the peer"):
        _compare(values, EXPECTED)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_of_a_peer_that_are_not_finite_prove_nothing(at: int, wrong: float) -> None:
    expected = [EXPECTED[1], list(EXPECTED[0])]
    expected[1][at] = wrong
    for values in (EXPECTED[::-1], expected):
        with pytest.raises(WrongResultError, match="weight 1 of ronde differs from that of the peer"):
            _compare(values, expected)


@pytest.mark.parametrize("values", [[], EXPECTED[:1], [*EXPECTED, [1.0]], [EXPECTED[0][:2], EXPECTED[1]]])
def test_missing_and_further_values_are_found(values: list[list[float]]) -> None:
    with pytest.raises(WrongResultError, match="the peer's has weights of"):
        _compare(values, EXPECTED)


def test_the_report_is_written_before_a_table_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ronde.bench.keras.require_tensorflow", lambda: None)
    monkeypatch.setattr("ronde.bench.keras.machine.describe", lambda: {"load_average_before": [0.0]})
    monkeypatch.setattr("ronde.bench.keras.render", lambda *_, **__: "tables")
    monkeypatch.setattr("ronde.bench.keras._world", lambda _fit, ranks: {"ranks": ranks})
    path, nowhere = tmp_path / "a.json", tmp_path / "no" / "a.md"
    assert main(["keras", "--ranks", "2", "--json", str(path), "--markdown", str(nowhere)]) == 73
    assert f"ronde bench: {nowhere} cannot be written" in capsys.readouterr().err
    assert json.loads(path.read_text())["worlds"] == [{"ranks": 2}]
    # Its tables are others than those of a report.
    assert main(["report", str(path)]) == 64
    assert "of schema 'ronde-bench-keras/1'" in capsys.readouterr().err
