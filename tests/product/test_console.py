"""What a person sees of a job: progress bars, a debugger, stalls, and the commands that look at hosts and sidecars."""

from __future__ import annotations

import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

import pytest
from pseudo_terminal import PseudoTerminal, screen_of

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = pathlib.Path(__file__).parent.parent.parent
# Beside other tests a process may take ten seconds to start, and those of a job start one after another.
WITHIN_S = 120.0
# Writes as tqdm does: the state first, then the rest of the line.
PROGRESS = """
import os, sys, time
rank = os.environ["RANK"]
for state in range(0, 101, 20):
    sys.stderr.write(f"\\r{state:3}%|{'#' * (state // 10)}| rank {rank}")
    sys.stderr.flush()
    time.sleep(0.05)
    if state == 40:
        print("a line of rank", rank, flush=True)
sys.stderr.write("\\n")
"""
# What tqdm 4.70 writes for two epochs of three batches, by its flushes; then the rank writes as one that fails.
NESTED = """
import os, sys, time
end = ["\\rbatch: 3/3", "\\n\\r"]
for epoch in range(2):
    states = ["\\n", "\\rbatch: 0/3", "\\x1b[A", "\\n", "\\rbatch: 2/3", "\\x1b[A", "\\n", "\\rbatch: 3/3", "\\x1b[A"]
    for piece in [f"\\repoch: {epoch}/2", *states, *end]:
        sys.stderr.write(piece)
        sys.stderr.flush()
        time.sleep(0.01)
    print("loss of rank", os.environ["RANK"], flush=True)
sys.stderr.write("\\repoch: 2/2\\n")
print("at the end", file=sys.stderr)
"""
# Colors that end after the line, and characters that a terminal does not show as text.
CONTROLS = b"\x1b[31mfailed\n\x1b[0ma\x0cb\x08c\x1e\xc2\x85\t\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\r\nend\n"
DEBUGGED = """
import os
rank = int(os.environ["RANK"])
secret = 42 + rank
if rank == 1:
    import pdb; pdb.set_trace()
print("rank", rank, "is done")
"""
# A rank comes late, after the report for people and before the one of Horovod.
LATE = """
import time, numpy, ronde
with ronde.connect() as client:
    if client.rank == 1:
        time.sleep(16)
    client.allreduce(numpy.ones(4), name="gradient")
"""
WATCHED = """
import pathlib, sys, time, numpy, ronde
with ronde.connect() as client:
    print("serving", flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.02)
    client.barrier()
"""


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="rc-") as name:
        yield pathlib.Path(name)


@pytest.fixture
def environment(folder: pathlib.Path) -> dict[str, str]:
    """The environment of a person's shell."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_", "HOROVOD_"))}
    return {
        **own,
        "PYTHONPATH": str(REPOSITORY / "sdk-python" / "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_RUNTIME_DIR": str(folder),
        "TERM": "xterm",
    }


@pytest.fixture
def ronde() -> str:
    """The program."""
    path = os.environ.get("RONDE_BIN")
    if not path:
        pytest.skip("RONDE_BIN is not set; run the tests by `make test-python`")
    return path


def script(folder: pathlib.Path, text: str) -> list[str]:
    """The command of a program."""
    (folder / "train.py").write_text(text)
    return [sys.executable, "train.py"]


def test_the_screen_is_that_of_a_terminal() -> None:
    assert screen_of("one\r\ntwo\r\n\x1b[2A\r\x1b[JONE\r\n") == ["ONE", ""]
    assert screen_of("10 %\r20") == ["20 %"]


def test_a_progress_bar_is_one_line_for_each_rank_in_a_terminal(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    terminal = PseudoTerminal([ronde, "run", "-np", "3", *script(folder, PROGRESS)], environment, folder)
    try:
        assert terminal.wait(WITHIN_S) == 0, terminal.text
    finally:
        terminal.close()
    assert "\x1b[J" in terminal.text, "lines were drawn again"
    lines = [line for line in terminal.screen() if line]
    for rank in range(3):
        bars = [line for line in lines if f"| rank {rank}" in line]
        assert bars == [f"[{rank}]<stderr>:100%|##########| rank {rank}"], lines
        assert f"[{rank}]<stdout>:a line of rank {rank}" in lines
    assert len(lines) == 6, lines


def test_a_progress_bar_in_a_terminal_without_control_sequences(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    command = [ronde, "run", "-np", "2", *script(folder, PROGRESS)]
    terminal = PseudoTerminal(command, {**environment, "TERM": "dumb"}, folder)
    try:
        assert terminal.wait(WITHIN_S) == 0, terminal.text
    finally:
        terminal.close()
    assert "\x1b" not in terminal.text, "TERM is that of a shell within Emacs"
    for rank in range(2):
        assert f"[{rank}]<stderr>:100%|##########| rank {rank}" in terminal.text.splitlines()


def test_a_progress_bar_is_its_last_state_in_a_pipe(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    command = [ronde, "run", "-np", "2", "--output-filename", "out", *script(folder, PROGRESS)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=WITHIN_S, check=True
    )
    assert sorted(done.stderr.splitlines()) == [f"[{rank}]<stderr>:100%|##########| rank {rank}" for rank in range(2)]
    assert "\x1b" not in done.stdout + done.stderr
    kept = (folder / "out" / "rank.0" / "stderr").read_bytes()
    assert kept.count(b"\r") == 6, "the file has what the rank wrote"


def of_nested_bars(rank: int) -> list[str]:
    """The lines of a rank of NESTED: an outer bar has ended before anything shows that another one is within it."""
    states = ["epoch: 0/2", "batch: 3/3", "batch: 3/3", "epoch: 2/2", "at the end"]
    return [f"[{rank}]<stderr>:{state}" for state in states]


def test_nested_progress_bars_in_a_terminal(ronde: str, folder: pathlib.Path, environment: dict[str, str]) -> None:
    terminal = PseudoTerminal([ronde, "run", "-np", "2", *script(folder, NESTED)], environment, folder)
    try:
        assert terminal.wait(WITHIN_S) == 0, terminal.text
    finally:
        terminal.close()
    lines = [line for line in terminal.screen() if line]
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}]<stderr>")] == of_nested_bars(rank), lines
        assert lines.count(f"[{rank}]<stdout>:loss of rank {rank}") == 2, lines
    assert len(lines) == 14, lines


def test_nested_progress_bars_do_not_fill_a_pipe(ronde: str, folder: pathlib.Path, environment: dict[str, str]) -> None:
    command = [ronde, "run", "-np", "2", *script(folder, NESTED)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=WITHIN_S, check=True
    )
    lines = done.stderr.splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == of_nested_bars(rank), lines
    assert "\x1b" not in done.stdout + done.stderr


def test_lines_end_their_colors_and_have_no_other_control_characters(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    program = script(folder, f"import sys\nsys.stdout.buffer.write({CONTROLS!r})")
    command = [ronde, "run", "-np", "1", "--output-filename", "out", *program]
    done = subprocess.run(command, capture_output=True, env=environment, cwd=folder, timeout=WITHIN_S, check=True)
    lines = [b"\x1b[31mfailed\x1b[0m", b"abc\tlink", b"end"]
    assert done.stdout.splitlines(keepends=True) == [b"[0]<stdout>:" + line + b"\n" for line in lines]
    assert (folder / "out" / "rank.0" / "stdout").read_bytes() == CONTROLS


def test_a_debugger_in_a_terminal(ronde: str, folder: pathlib.Path, environment: dict[str, str]) -> None:
    command = [ronde, "run", "-np", "2", "--stdin", "1", *script(folder, DEBUGGED)]
    terminal = PseudoTerminal(command, environment, folder)
    try:
        terminal.read_until("(Pdb) ", WITHIN_S)
        terminal.send("p secret\n")
        assert "[1]<stdout>:43" in terminal.read_until("(Pdb) ", WITHIN_S)
        terminal.send("c\n")
        assert terminal.wait(WITHIN_S) == 0, terminal.text
    finally:
        terminal.close()
    for rank in range(2):
        assert f"[{rank}]<stdout>:rank {rank} is done" in terminal.screen(), terminal.text


def test_the_input_of_a_pipe_goes_to_one_rank_and_ends(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    program = script(folder, "import os, sys\nprint(os.environ['RANK'], len(sys.stdin.read()))")
    text = "a line\n" * 50_000
    for sidecars in ("1", "2"):
        done = subprocess.run(
            [ronde, "run", "-np", "2", "--sidecars", sidecars, "--stdin", "1", *program],
            input=text,
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
            timeout=WITHIN_S,
            check=True,
        )
        assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:0 0", f"[1]<stdout>:1 {len(text)}"]


def test_a_rank_that_reads_nothing_does_not_keep_the_job_from_ending(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [ronde, "run", "-np", "2", "--stdin", "0", *script(folder, "print('done')")],
        input="x" * (1 << 20),
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_only_a_rank_of_the_job_can_have_the_input(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    command = [ronde, "run", "-np", "2", "--stdin", "2", "true"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=WITHIN_S, check=False
    )
    assert (done.returncode, done.stderr) == (64, "ronde: --stdin 2: the ranks of this job are 0 to 1 [RONDE-E101]\n")


def test_a_stall_is_reported_once_and_early_in_a_terminal(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    terminal = PseudoTerminal([ronde, "run", "-np", "2", *script(folder, LATE)], environment, folder, (40, 400))
    try:
        assert terminal.wait(WITHIN_S) == 0, terminal.text
    finally:
        terminal.close()
    assert terminal.text.count("waiting for remainder of ranks for more than 10 seconds") == 1, terminal.text
    assert terminal.text.count("Missing ranks:") == 1
    assert "Rank(" not in terminal.text, "no debug format"


def test_a_check_as_json_decides_whether_to_stop(ronde: str, folder: pathlib.Path) -> None:
    done = subprocess.run(
        [ronde, "check", "--json"], capture_output=True, text=True, cwd=folder, timeout=60, check=False
    )
    answer = json.loads(done.stdout)
    summary = answer["summary"]
    assert done.returncode == int(summary["stop"])
    marks = [finding["mark"] for finding in answer["findings"]]
    assert {mark: marks.count(mark) for mark in ("ok", "warn", "fail")} == {
        mark: summary[mark] for mark in ("ok", "warn", "fail")
    }
    lines = subprocess.run([ronde, "check"], capture_output=True, text=True, cwd=folder, timeout=60, check=False).stdout
    assert lines.splitlines()[-1] == summary["text"]


def test_a_status_that_is_watched_ends_with_the_job(
    ronde: str, folder: pathlib.Path, environment: dict[str, str]
) -> None:
    go = folder / "go"
    command = [ronde, "run", "-np", "2", *script(folder, WATCHED), str(go)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder) as job:
        try:
            assert job.stdout is not None
            assert select.select([job.stdout], [], [], WITHIN_S)[0], "no rank serves"
            assert "serving" in job.stdout.readline()
            once = subprocess.run(
                [ronde, "status", "--json"], capture_output=True, text=True, env=environment, timeout=60, check=True
            )
            assert json.loads(once.stdout)["job"].startswith("run-")
            words = [ronde, "status", "--watch", "--json"]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as watch:
                # A line that does not come ends with the process.
                late = threading.Timer(WITHIN_S, watch.kill)
                late.start()
                try:
                    assert watch.stdout is not None
                    states = [json.loads(watch.stdout.readline()) for _ in range(2)]
                    go.touch()
                    assert watch.wait(WITHIN_S) == 0
                finally:
                    late.cancel()
                    watch.kill()
            assert {state["job"] for state in states} == {json.loads(once.stdout)["job"]}
            assert job.wait(WITHIN_S) == 0
        finally:
            go.touch()
            job.kill()
