"""Makes each mistake of the table in `mistakes.py` with real processes: the answer, the exit code, and what is left."""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from typing import TYPE_CHECKING

import pytest
from mistakes import MISTAKES, Mistake

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = pathlib.Path(__file__).parent.parent.parent
PAGE = REPOSITORY / "docs" / "TROUBLESHOOTING.md"
BEGIN, END = "<!-- begin of the table of tests/product/mistakes.py -->\n", "<!-- end of the table -->\n"
# Until the ranks of a job train.
TRAINING_WITHIN_S = 120.0
MARK = "RONDE_TEST_MISTAKE"
# Each of two sidecars needs at least two: one for control messages, and one for a lane.
TAKEN_PORTS = 4


@pytest.fixture
def place() -> Iterator[pathlib.Path]:
    """A directory with a short path: that of a Unix socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="rm-") as name:
        yield pathlib.Path(name)


@pytest.fixture
def taken() -> Iterator[str]:
    """A range of ports that are taken, over UDP and TCP."""
    first = None
    while first is None:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, OverflowError):
                first = bind_range(stack)
            if first is not None:
                yield f"{first}-{first + TAKEN_PORTS - 1}"


def bind_range(stack: contextlib.ExitStack) -> int:
    """Binds as many ports, one after the other; returns the first. Raises OSError if one of them is in use."""
    first = 0
    for index in range(TAKEN_PORTS):
        tcp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        tcp.bind(("0.0.0.0", first + index))
        first = first or tcp.getsockname()[1]
        tcp.listen()
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("0.0.0.0", first + index))
    return first


def binary() -> str:
    """The program `ronde`; skips the test if there is none."""
    path = os.environ.get("RONDE_BIN")
    if not path:
        pytest.skip("RONDE_BIN is not set; run the tests by `make test-python`")
    return path


class Attempt:
    """A mistake that is made."""

    def __init__(self, mistake: Mistake, place: pathlib.Path, taken: str) -> None:
        """Starts the command in `place`."""
        self.mark = uuid.uuid4().hex
        self.work, self.runtime, self.temporary = (place / name for name in ("work", "run", "tmp"))
        for folder in (self.work, self.runtime, self.temporary):
            folder.mkdir(mode=0o700)
        files = dict(mistake.files) if mistake.program is None else {**mistake.files, "train.py": mistake.program}
        for name, text in files.items():
            (self.work / name).write_text(text)
        programs = {"ronde": binary(), "python": sys.executable}
        words = [programs.get(word, word).replace("{taken}", taken) for word in mistake.command]
        self.shared = set(os.listdir("/dev/shm"))
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.work,
            env={**self.environment(), **mistake.variables},
            start_new_session=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.output: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def environment(self) -> dict[str, str]:
        """The environment of a newcomer: no variable of ronde or of another launcher."""
        foreign = ("RONDE_", "HOROVOD_", "SLURM_", "OMPI_", "PMI_")
        own = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {
            **own,
            "PYTHONPATH": str(REPOSITORY / "sdk-python" / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_RUNTIME_DIR": str(self.runtime),
            "TMPDIR": str(self.temporary),
            "PATH": f"{pathlib.Path(sys.executable).parent}:{own['PATH']}",
            MARK: self.mark,
        }

    def wait(self, deadline: float) -> int:
        """Waits for the end of the command, and returns the status."""
        try:
            return self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail(f"still runs after the time to fail:\n{self.text()}", pytrace=False)

    def wait_gone(self, deadline: float) -> list[str]:
        """Waits until nothing is left of the command, and returns what is left at the deadline."""
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def wait_for(self, piece: str, within_s: float) -> None:
        """Waits for a line with this piece."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line with {piece!r}:\n{self.text()}", pytrace=False)
            if piece in line:
                return

    def processes(self) -> dict[int, str]:
        """The processes that the command started and that still run, with their commands."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def left(self) -> list[str]:
        """What it has left: processes, files of running jobs, temporary files, shared memory; not flight records."""
        files = [path for path in self.files() if not is_of_flight_records(path)]
        shared = [name for name in set(os.listdir("/dev/shm")) - self.shared if "ronde" in name]
        return [*self.processes().values(), *files, *shared]

    def records(self) -> list[str]:
        """The flight records that it has left, and their folders."""
        return [path for path in self.files() if is_of_flight_records(path)]

    def files(self) -> list[str]:
        """What is in the folders of running jobs and of temporary files."""
        return [str(path) for folder in (self.runtime, self.temporary) for path in folder.rglob("*")]

    def text(self) -> str:
        """What it has printed."""
        return "".join(self.output)

    def end(self) -> None:
        """Ends what a failed test has left."""
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait(10)
        self.reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            self.output.append(text)
            self.lines.put(text)


def is_of_flight_records(path: str) -> bool:
    """Whether a path is that of a flight record or of a folder with some."""
    return "/ronde.flight-" in path


def meddle(attempt: Attempt, mistake: Mistake) -> None:
    """Does what happens while the ranks train."""
    after = mistake.after
    attempt.wait_for("training", TRAINING_WITHIN_S)
    if after == "kill sidecar":
        index = b"RONDE_SIDECAR=1\0"
        sidecars = [number for number, words in attempt.processes().items() if " sidecar --bootstrap" in words]
        (second,) = [number for number in sidecars if index in pathlib.Path(f"/proc/{number}/environ").read_bytes()]
        os.kill(second, signal.SIGKILL)
    elif after == "kill launcher":
        attempt.process.kill()
    elif after == "interrupt twice":
        attempt.process.send_signal(signal.SIGINT)
        attempt.wait_for("once more kills them", mistake.within_s)
        attempt.process.send_signal(signal.SIGINT)
    else:
        raise AssertionError(f"{after!r} is not known")


def check_answer(mistake: Mistake, answer: str) -> None:
    """The pieces are in the answer, in order, and nothing that users should not see."""
    at = 0
    for piece in mistake.shows:
        found = answer.find(piece, at)
        assert found >= 0, f"{piece!r} is not in the answer, or not in its place:\n{answer}"
        at = found
    for piece in mistake.never:
        assert piece not in answer, answer
    printed = [line for line in answer.splitlines() if line.startswith("ronde: ")]
    codes = [line for line in printed if "[RONDE-E" in line]
    assert len(codes) <= 1, f"the cause is named once:\n{answer}"
    for line in codes:
        sentence = line.removeprefix("ronde: ").partition(" [RONDE-E")[0]
        assert sum(sentence in other for other in printed) == 1, f"the launcher prints {sentence!r} once:\n{answer}"
    check_codes(answer)


# The code of a cause, and the beginning of a line of a rank.
CODE = re.compile(r"\[(RONDE-E\d+)\]")
OF_RANK = re.compile(r"\[(\d+)\]<std(?:out|err)>:")
# The codes of errors that another rank or a sidecar causes.
OF_OTHERS = ("RONDE-E301", "RONDE-E305", "RONDE-E401")


def check_codes(answer: str) -> None:
    """The code of the cause is in one line besides those of the ranks, each of which names its own once."""
    own: list[str] = []  # of the launcher and the sidecars
    quoted: list[str] = []  # the last lines of a process, in the block
    ranks: dict[str, list[str]] = {}
    for line in answer.splitlines():
        codes = CODE.findall(line)
        if (rank := OF_RANK.match(line)) is not None:
            ranks.setdefault(rank[1], []).extend(codes)
        else:
            (quoted if own and line.startswith("  ") else own).extend(codes)
    assert len(own) <= 1, f"the code is printed once:\n{answer}"
    assert all(code in own for code in quoted), f"the block has the code of the lines that it quotes:\n{answer}"
    assert all(len(codes) <= 1 for codes in ranks.values()), f"a rank names its error once:\n{answer}"
    if sum(any(code not in OF_OTHERS for code in codes) for codes in ranks.values()) > 1:
        assert "failed, too" in answer, f"ranks with an error of their own are no followers:\n{answer}"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["[sidecar 0]: ERROR no plugin [RONDE-E801]", "ronde: no plugin [RONDE-E801]"], "printed once"),
        (["ronde: rank 0 exited [RONDE-E301]", "  MismatchError: dtypes [RONDE-E306]"], "lines that it quotes"),
        (["[0]<stderr>:a [RONDE-E301]", "[0]<stderr>:a [RONDE-E301]"], "names its error once"),
        (
            ["[0]<stderr>:a [RONDE-E306]", "[1]<stderr>:a [RONDE-E306]", "1 other rank ended because of that"],
            "followers",
        ),
        (["[0]<stderr>:a [RONDE-E306]", "[1]<stderr>:a [RONDE-E306]", "1 other rank failed, too, with 1"], None),
        (["[0]<stderr>:a [RONDE-E301]", "[1]<stderr>:a [RONDE-E301]", "ronde: rank 2 was killed [RONDE-E301]"], None),
    ],
)
def test_an_answer_that_repeats_a_code_is_found(lines: list[str], complaint: str | None) -> None:
    if complaint is None:
        check_codes("\n".join(lines))
        return
    with pytest.raises(AssertionError, match=complaint):
        check_codes("\n".join(lines))


def check_records(mistake: Mistake, records: list[str]) -> None:
    """Flight records are left by failures that write some, and by no others."""
    assert mistake.records in {"never", "maybe", "always"}, mistake.name
    if mistake.records == "never":
        assert records == []
    if mistake.records == "always":
        assert [path for path in records if path.endswith(".flight.json")] != [], records


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_explained_and_nothing_is_left(mistake: Mistake, place: pathlib.Path, taken: str) -> None:
    if mistake.name == "unknown_host" and shutil.which("ssh") is None:
        pytest.skip("LEFT OUT: ssh is not installed")
    attempt = Attempt(mistake, place, taken)
    deadline = time.monotonic() + mistake.within_s
    try:
        if mistake.after:
            meddle(attempt, mistake)
            deadline = time.monotonic() + mistake.within_s
        status = attempt.wait(deadline)
        left = attempt.wait_gone(deadline)
        attempt.reader.join(10)
        check_answer(mistake, attempt.text())
        assert status == mistake.status, attempt.text()
        assert left == []
        check_records(mistake, attempt.records())
    finally:
        attempt.end()


def test_the_table_has_the_24_mistakes() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(names) == len(set(names)) == 24


def typed(mistake: Mistake) -> str:
    """Returns the command as the document shows it."""
    words = [f"{name}={value}" for name, value in mistake.variables.items()]
    words += [word.replace("{taken}", f"7400-{7400 + TAKEN_PORTS - 1}") for word in mistake.command]
    return " ".join(words)


COLUMNS = ("mistake", "command", "the answer has", "exit code", "ended within", "what to do")


def code(text: str) -> str:
    """Returns a text as a code span of Markdown. One with backticks gets two around it."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def row(mistake: Mistake) -> str:
    """Returns a mistake as a row of the document's table. A bar that is no border of a cell is escaped."""
    within = f"{mistake.within_s:g} s" + (" after that" if mistake.after else "")
    pieces = "<br>".join(code(piece) for piece in mistake.shows)
    # As a shell shows a process that a signal has ended.
    status = mistake.status if mistake.status >= 0 else 128 - mistake.status
    cells = [mistake.title, code(typed(mistake)), pieces, str(status), within, mistake.cause]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def section() -> str:
    """The section of the document."""
    head = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"
    return BEGIN + head + "".join(row(mistake) for mistake in MISTAKES) + END


# A code span of Markdown ends at as many backticks as it begins with.
SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)")


def check_row(line: str) -> None:
    """A row has as many cells as the table, and each code span in a cell ends there."""
    before, *cells, after = re.split(r"(?<!\\)\|", line.rstrip("\n"))
    assert (before, after, len(cells)) == ("", "", len(COLUMNS)), line
    assert [cell for cell in cells if "`" in SPAN.sub("", cell)] == [], line


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_row_of_the_table_has_its_cells(mistake: Mistake) -> None:
    check_row(row(mistake))


def test_bars_and_backticks_stay_within_their_cells() -> None:
    command = ["ronde", "run", "sh", "-c", "python train.py | tee log"]
    mistake = Mistake("bars", "a | b", command, ["extra `=`", "`|`", "[RONDE-E104]"], 1, "See `a` | b.", within_s=1)
    text = row(mistake)
    check_row(text)
    assert "`` extra `=` ``<br>`` `\\|` ``<br>`[RONDE-E104]`" in text
    for broken in ("| a | `b` | `c | d` | 1 | 1 s | e |", "| a | `b` | `extra `=`` | 1 | 1 s | e |"):
        with pytest.raises(AssertionError):
            check_row(broken)


def test_the_document_has_the_table() -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1, f"{PAGE} lacks the marks of the table"
    before, _, rest = text.partition(BEGIN)
    expected = before + section() + rest.partition(END)[2]
    if text != expected and os.environ.get("RONDE_REGENERATE"):
        PAGE.write_text(expected)
        return
    assert text == expected, (
        "docs/TROUBLESHOOTING.md differs from tests/product/mistakes.py; run with RONDE_REGENERATE=1"
    )
