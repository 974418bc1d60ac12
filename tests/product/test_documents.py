"""The commands and programs of the documentation work.

Every block in a language that can be run is run, page by page in order, in a folder of the page's own, with the wheel
installed; or a comment above gives the reason: `<!-- not run: REASON -->`. The first line of a block that is a file
names it and the command that runs it: `# mean.py: ronde run -np 4 python mean.py`; with `  # it fails` after it, the
command has to fail. The one before it prints each line of a text under `<!-- output -->`, in which `…` matches text
that varies. Programs in Rust are compiled as documentation tests of sdk-rust/src/lib.rs.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import pytest
from blocks import RUN, SHOWN, Block, blocks, of_section
from installed import provide_numpy, wheelhouse
from terminal import BlockError, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ["*.md", "docs/*.md", "*/README.md", "*/*/README.md", "sidecar/crates/*/README.md"]
    for path in ROOT.glob(pattern)
    if not any(part in {"target", "dist", ".venv"} for part in path.parts) and path.name != "CHANGELOG.md"
)


@pytest.fixture(scope="session")
def reader(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of somebody who has installed the wheel, and PyTorch, into an environment that is active."""
    folder = tmp_path_factory.mktemp("reader") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    provide_numpy(python)
    # numpy and torch are those of the tests' environment.
    site = next(folder.glob("lib/python*/site-packages"))
    linked = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "linked.pth").write_text("\n".join(linked) + "\n")
    return {
        "PATH": f"{folder / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "TERM": "dumb",
        # What pages install comes from the wheels that are here.
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheelhouse()),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@pytest.fixture
def terminal(reader: dict[str, str], wheel: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Terminal]:
    """A terminal in a fresh folder, with the wheel where `make wheel` puts it."""
    terminal = Terminal(tmp_path, {**reader, "HOME": str(tmp_path)})
    (terminal.work / "dist").mkdir()
    os.symlink(wheel, terminal.work / "dist" / wheel.name)
    yield terminal
    terminal.close()


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_work(page: str, terminal: Terminal) -> None:
    for block in blocks(page, (ROOT / page).read_text()):
        assert block.language in RUN | SHOWN, f"{block}: `{block.language}` is none of {sorted(RUN | SHOWN)}"
        if block.language == "rust" and block.not_run is None:
            assert page in compiled_pages(), (
                f"{block}: the page is not among the tests at the end of sdk-rust/src/lib.rs"
            )
        elif (block.language in RUN or block.is_output) and block.not_run is None:
            terminal.run(block)


def test_every_kind_of_block_is_found_and_run() -> None:
    readme, quickstart = (blocks(page, (ROOT / page).read_text()) for page in ("README.md", "docs/QUICKSTART.md"))
    assert {"sh", "python", "rust"} <= {block.language for block in readme}
    assert any(block.file and block.file[1] is None for block in readme), "README.md has no program"
    assert any(block.file and block.file[1] for block in quickstart), "QUICKSTART.md has no program with its command"
    assert any(block.is_output for block in readme), "README.md shows no output"


def test_the_job_of_the_quickstart_runs_while_its_status_is_read(terminal: Terminal) -> None:
    """`ronde status` prints what the page shows, and a reader has a minute for it."""
    page = ROOT / "docs" / "QUICKSTART.md"
    program, start, status, shown = of_section(page, "Watch a running job")
    lasts = re.search(r"range\((\d+)\).*sleep\(([\d.]+)\)", program.text, re.DOTALL)
    assert lasts, program
    assert int(lasts[1]) * float(lasts[2]) >= 60
    # Other jobs of this user are not shown.
    with tempfile.TemporaryDirectory(prefix="rt-") as runtime:  # the path of a socket has at most 107 bytes
        terminal.environment["XDG_RUNTIME_DIR"] = runtime
        terminal.run(program)
        terminal.execute(start, f"{start.text} &")
        deadline = time.monotonic() + 120
        while True:
            try:
                terminal.run(status)
                return terminal.compare(shown)
            except BlockError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)


def compiled_pages() -> set[str]:
    """The pages whose Rust programs are compiled."""
    source = (ROOT / "sdk-rust" / "src" / "lib.rs").read_text()
    included = re.findall(r'#\[doc = include_str!\("(.+)"\)\]', source)
    return {os.path.normpath(f"sdk-rust/src/{path}") for path in included}


PAGE = """# One
<!-- not run: it would reformat the disk -->
```sh
format
```
Text, then a list:

1. step
   ```python
   # a.py: python a.py
   if True:
       print("hello   there")
   ```

<!-- output -->
```text
hello there
```
## Two
```sh
export COLOUR=red
mkdir folder && cd folder
```
```sh
echo "$COLOUR in $(basename "$PWD")"
```
<!-- output -->
```text
red in folder
```
"""


def test_blocks_carry_the_comment_above_them() -> None:
    found = blocks("page.md", PAGE)
    assert [(block.language, block.line, block.heading) for block in found] == [
        ("sh", 3, "One"),
        ("python", 9, "One"),
        ("text", 16, "One"),
        ("sh", 20, "Two"),
        ("sh", 24, "Two"),
        ("text", 28, "Two"),
    ]
    assert found[0].not_run == "it would reformat the disk"
    assert found[1].file == ("a.py", "python a.py")
    assert found[1].text == '# a.py: python a.py\nif True:\n    print("hello   there")'
    assert [block.is_output for block in found] == [False, False, True, False, False, True]
    (kept,) = blocks("page.md", "<!-- output, not run: it needs two hosts -->\n```text\nhello\n```\n")
    assert kept.is_output
    assert kept.not_run == "it needs two hosts"
    with pytest.raises(ValueError, match=r"page\.md:1: the block does not end"):
        blocks("page.md", "```sh\ntrue\n")


def test_a_terminal_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    terminal = Terminal(tmp_path, {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"})
    for block in blocks("page.md", PAGE)[1:]:
        terminal.run(block)
    assert terminal.output == "red in folder\n"


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("sh", "echo before; false\necho after", "status 1"),
        ("python", "raise KeyError('gone')", "gone"),
        ("toml", "key = 1", "first line"),
    ],
)
def test_a_failing_block_is_reported_with_its_place_and_output(
    language: str, text: str, words: str, tmp_path: pathlib.Path
) -> None:
    terminal = Terminal(tmp_path, dict(os.environ))
    with pytest.raises(BlockError) as failed:
        terminal.run(Block("page.md", 7, "", language, text))
    assert words in str(failed.value)
    assert "page.md:7" in str(failed.value)
    assert "after" not in terminal.output


def test_a_command_fails_where_its_page_expects_that(tmp_path: pathlib.Path) -> None:
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    terminal = Terminal(tmp_path, {**os.environ, "PATH": path})
    program = "# a.py: python a.py  # it fails\nimport sys\nprint('before')\nsys.exit({})"
    terminal.run(Block("page.md", 1, "", "python", program.format(3)))
    assert terminal.output == "before\n"
    with pytest.raises(BlockError, match="status 1"):
        terminal.run(Block("page.md", 1, "", "python", program.format(0)))
    assert Block("page.md", 1, "", "python", "# a.py: python a.py # 1").file == ("a.py", "python a.py # 1")


def test_output_that_is_not_printed_is_a_failure(tmp_path: pathlib.Path) -> None:
    terminal = Terminal(tmp_path, dict(os.environ))
    terminal.run(Block("page.md", 1, "", "sh", "echo one; echo two"))
    terminal.run(Block("page.md", 5, "", "text", "two", is_output=True))
    with pytest.raises(BlockError, match="three"):
        terminal.run(Block("page.md", 9, "", "text", "one\nthree", is_output=True))


@pytest.mark.parametrize(
    ("shown", "is_printed"),
    [
        ("[1]<stdout>:mean 1.5, sum 6.0", True),
        ("[1]<stdout>:mean 1.5,  sum 6.0", True),
        ("[1]<stdout>:mean …, sum 6.0", True),
        ("…sum 6.0", True),
        ("[1]<stdout>:mean…", True),
        # Part of a line is not the line.
        ("mean 1.5, sum 6.0", False),
        ("[1]<stdout>:mean 1.5", False),
        ("[1]<stdout>:mean 1.5, sum …1.0", False),
        # Nothing but `…` matches other text.
        ("[.]<stdout>:mean 1.5, sum 6.0", False),
        ("[1]<stdout>:mean .*", False),
    ],
)
def test_whole_lines_are_compared(shown: str, is_printed: bool, tmp_path: pathlib.Path) -> None:
    terminal = Terminal(tmp_path, dict(os.environ))
    terminal.output = "before\n[1]<stdout>:mean 1.5, sum 6.0\nafter\n"
    block = Block("page.md", 1, "", "text", f"after\n{shown}", is_output=True)
    if is_printed:
        return terminal.compare(block)
    with pytest.raises(BlockError, match="these lines are not printed"):
        terminal.compare(block)
    return None
