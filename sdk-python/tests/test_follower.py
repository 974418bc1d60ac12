"""The codes of exceptions, and the last words of ranks that end because of another one."""

from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys

import pytest
from conftest import ronde_binary

import ronde
from ronde import follower
from ronde.codes import CAUSES, code_in, marked
from ronde.errors import from_parts

TIMEOUT_S = 120


def test_every_cause_has_the_code_that_the_launcher_explains() -> None:
    for cause, code in CAUSES.items():
        done = subprocess.run(
            [ronde_binary(), "explain", cause], capture_output=True, text=True, timeout=30, check=True
        )
        assert done.stdout.startswith(f"{code}: "), (cause, done.stdout)


def test_an_exception_has_its_code_in_the_text_and_as_an_attribute() -> None:
    error = from_parts("mismatch", "Mismatched shapes\nof two ranks", None, None, "t", "caller")
    assert (str(error), error.code) == ("Mismatched shapes [RONDE-E306]\nof two ranks", "RONDE-E306")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code) == (str(error), error.code)
    assert ronde.RondeError("no cause").code is None
    assert str(ronde.RondeError("no cause")) == "no cause"
    assert str(ronde.RondeError(cause="limit")) == ""
    assert ronde.RondeError(cause="limit").code == "RONDE-E308"


def test_a_more_specific_code_is_kept() -> None:
    error = ronde.RondeError("a port is taken [RONDE-E404]", "connect")
    assert (str(error), error.code) == ("a port is taken [RONDE-E404]", "RONDE-E404")
    assert marked("", "RONDE-E301") == ""
    assert code_in("plain\n[RONDE-E301]") is None


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_error_because_of_another_rank_is_one_line() -> None:
    text = "rank 2 on host beta exited with code 1\nThe last lines of its stderr:\n  | boom"
    error = raised(ronde.PeerLostError(text, "rank_lost", 2))
    line = follower.summary(error, error.__traceback__)
    assert line is not None
    assert line.startswith("PeerLostError: rank 2 on host beta exited with code 1 [RONDE-E301] (at ")
    assert "test_follower.py:" in line
    assert "\n" not in line


@pytest.mark.parametrize("error", [ValueError("own"), ronde.MismatchError("own", "mismatch"), ronde.RondeError("own")])
def test_an_error_of_its_own_keeps_its_traceback(error: BaseException) -> None:
    assert follower.summary(error, None) is None


PROGRAM = """
import sys
import ronde
from ronde import follower

{before}
follower.install()
raise ronde.ShutDownError("rank 1 has shut down", "shut_down", 1)
"""


# A bar like those of tqdm, whose class has the open ones.
BAR = """
import types
bar = types.SimpleNamespace(fp={stream})
sys.modules["tqdm"] = types.SimpleNamespace(tqdm=types.SimpleNamespace(_instances=[bar]))
print("5/10", end="", file={stream}, flush=True)
"""
LAUNCHED = {"RONDE_SIZE": "2", "RONDE_TOKEN_FILE": "t"}


@pytest.mark.parametrize(
    ("before", "variables", "is_short"),
    [
        ("", {"RONDE_SIZE": "2", "RONDE_TOKEN_FILE": "t"}, True),
        ("", {"RONDE_SIZE": "2", "RONDE_TOKEN_FILE": "t", "RONDE_TRACEBACKS": "1"}, False),
        ("", {}, False),
        ("sys.excepthook = lambda *_: print('Traceback own', file=sys.stderr)", {"RONDE_SIZE": "2"}, False),
    ],
)
def test_only_workers_of_the_launcher_shorten_it(before: str, variables: dict[str, str], is_short: bool) -> None:
    stderr = stderr_of(before, variables)
    assert ("Traceback" not in stderr) == is_short
    assert not is_short or stderr.startswith("ShutDownError: rank 1 has shut down [RONDE-E305]"), stderr


@pytest.mark.parametrize(
    ("stream", "begin"), [("sys.stderr", "5/10\nShutDownError: "), ("sys.stdout", "ShutDownError: ")]
)
def test_it_has_a_line_of_its_own_after_a_progress_bar(stream: str, begin: str) -> None:
    assert stderr_of(BAR.format(stream=stream), LAUNCHED).startswith(begin)


def test_it_has_a_line_of_its_own_after_a_bar_of_tqdm() -> None:
    pytest.importorskip("tqdm", reason="LEFT OUT: tqdm is not installed")
    stderr = stderr_of("import tqdm\nbar = tqdm.tqdm(total=10)\nbar.update(5)", LAUNCHED)
    assert "5/10" in stderr
    assert [line for line in stderr.split("\n") if line.startswith("ShutDownError: rank 1 has shut down")], stderr
    closed = stderr_of("import tqdm\nlist(tqdm.tqdm([1]))", LAUNCHED)
    assert "\n\n" not in closed, closed


def stderr_of(before: str, variables: dict[str, str]) -> str:
    """What a program writes to standard error that raises an error after `before`."""
    package = str(pathlib.Path(__file__).parent.parent / "python")
    own = {name: value for name, value in os.environ.items() if not name.startswith("RONDE_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**own, "PYTHONPATH": package, **variables},
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


def test_an_error_of_the_program_is_not_hidden_by_one_that_followed() -> None:
    def fail() -> None:
        try:
            raise ValueError("the program's own")
        finally:
            raise ronde.PeerLostError("rank 1 is lost", "rank_lost", 1)

    with pytest.raises(ronde.PeerLostError) as failed:
        fail()
    assert follower.summary(failed.value, failed.value.__traceback__) is None
