"""docs/coverage.json: what of Horovod's documentation there is. A row that works has names, which are looked up in the
sources with their parameters, or other evidence: tests, flags of `horovodrun`, or files, which have to be there. The
tables of docs/COVERAGE.md and docs/MIGRATING.md are made from it.

RONDE_REGENERATE=1 writes these tables. To change a state, change the row in docs/coverage.json.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib.util
import os
import re
from typing import Any

import pytest
from coverage_names import DATA, NAMES, ROOT, ROWS, check_imports, check_in_sources

STATES = ("works", "needless", "not there")
PAGE, MIGRATING = ROOT / "docs" / "COVERAGE.md", ROOT / "docs" / "MIGRATING.md"
BEGIN, END = "<!-- coverage: made from coverage.json -->\n", "<!-- coverage: end -->\n"
HEAD = """# Coverage of Horovod

This page answers what of Horovod's documentation there is here, row by row. It is made from
[coverage.json](coverage.json) by `sdk-python/tests/test_coverage.py`; do not edit it. For each row that works that file
names functions and classes, whose parameters tests compare with the code, or the tests, flags and files that show it.

*works*: does what that documentation says, with what is beside it. *needless*: is not here; what is beside it does the
same work in another way, or says why nothing has to be done. *not there*: does not work, for the reason beside it.

"""
# Evidence of a row, of which one that works without names needs some.
EVIDENCE = ("tests", "flags", "files")
# Files alone show what is to be read or to be built, and no function.
GROUPS_OF_FILES = range(19, 24)
EVIDENT = [(kind, each) for kind in EVIDENCE for each in sorted({each for row in ROWS for each in row.get(kind, [])})]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there_with_its_parameters(name: str) -> None:
    check_in_sources(name)


@pytest.mark.parametrize("package", ["horovod.data", "horovod.run", "horovod.runner", "horovod.torch"])
def test_what_the_sources_show_is_what_python_has(package: str) -> None:
    """Also by importing, for what is installed here. tests/frameworks, tests/spark, tests/ray have the others."""
    if package == "horovod.torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    check_imports(package)


@pytest.mark.parametrize(
    "name",
    [
        "horovod.torch.nothing",
        "horovod.nothing.init",
        "horovod.torch.allreduce(nothing)",
        "horovod.torch.Compression.nothing",
        "horovod.tensorflow.allreduce(nothing)",
        "horovod.ray.RayExecutor(nothing)",
        "horovod.ray.RayExecutor(..., nothing)",
        # Another order, another default, a default of what has none, and a parameter that a call needs.
        "horovod.torch.broadcast(root_rank, tensor)",
        "horovod.torch.allreduce(tensor, ..., op=None, name=None)",
        "horovod.torch.join(device=0)",
        "horovod.torch.allreduce(tensor, compression=Compression.fp16)",
        "horovod.torch.poll(handle=None)",
        "horovod.torch.broadcast(tensor)",
        # Keywords by position, and what only `**values` of a class would take.
        "horovod.spark.keras.KerasEstimator(num_proc)",
        "horovod.spark.keras.KerasEstimator(*, nothing)",
        "horovod.spark.common.store.HDFSStore(..., nothing)",
        "horovod.spark.common.backend.SparkBackend(num_proc, nothing)",
        "horovod.keras.callbacks.LearningRateWarmupCallback(initial_lr, nothing)",
        # Nothing shows parameters of a constant.
        "horovod.torch.Average()",
    ],
)
def test_a_name_that_is_not_there_fails(name: str) -> None:
    with pytest.raises(AssertionError):
        check_in_sources(name)


@pytest.mark.parametrize(
    "name",
    [
        "horovod.spark.common.store.HDFSStore(..., temp_dir=None, ..., save_runs=True)",
        "horovod.spark.torch.TorchEstimator(*, backward_passes_per_step, num_proc)",
        "horovod.keras.callbacks.LearningRateWarmupCallback(initial_lr, warmup_epochs=5)",
        "horovod.ray.elastic_v2.ElasticParams(cpus_per_worker=1, ..., min_workers=1)",
        "horovod.torch.allreduce(tensor, ..., compression=Compression.none)",
    ],
)
def test_parameters_of_bases_and_forwarded_ones_are_found(name: str) -> None:
    check_in_sources(name)


def test_rows_are_complete() -> None:
    groups = [row["group"] for row in ROWS]
    assert sorted(set(groups)) == list(range(1, 24))
    assert set(DATA["groups"]) == {str(group) for group in set(groups)}
    items = [(row["group"], row["item"]) for row in ROWS]
    assert len(set(items)) == len(items)
    for row in ROWS:
        assert row["state"] in STATES, row
        assert row["note"] or row["state"] == "works", f"{row['item']}: {row['state']} needs its sentence"
        assert set(row) - set(EVIDENCE) == {"group", "item", "state", "note", "names"}
        assert all(row[kind] for kind in EVIDENCE if kind in row), row
        kinds = {kind for kind in EVIDENCE if kind in row and (kind != "files" or row["group"] in GROUPS_OF_FILES)}
        assert row["names"] or kinds or row["state"] != "works", f"{row['item']}: nothing shows that it works"


@pytest.mark.parametrize(("kind", "what"), EVIDENT)
def test_evidence_is_there(kind: str, what: str) -> None:
    check_evidence(kind, what)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("tests", "sdk-python/tests/test_coverage.py::test_nothing"),
        ("tests", "sdk-python/tests/test_coverage.py::check_evidence"),
        ("tests", "sdk-python/tests/test_nothing.py::test_rows_are_complete"),
        ("tests", "tests/tests/tidy/documents.rs::nothing"),
        ("flags", "--nothing"),
        ("files", "docs/NOTHING.md"),
    ],
)
def test_evidence_that_is_not_there_fails(kind: str, what: str) -> None:
    with pytest.raises(AssertionError):
        check_evidence(kind, what)


def check_evidence(kind: str, what: str) -> None:
    """Fails for a test, a flag of `horovodrun` or a file that is not there."""
    if kind == "tests":
        path, _, function = what.partition("::")
        assert function in named_tests(path), f"{path} has no test {function}"
    elif kind == "flags":
        assert what in flags_of_horovodrun(), f"horovodrun has no flag {what}"
    else:
        assert (ROOT / what).is_file(), f"there is no file {what}"


@functools.cache
def named_tests(path: str) -> frozenset[str]:
    """The tests of a file, in Python or Rust."""
    file = ROOT / path
    assert file.is_file(), f"there is no file {path}"
    text = file.read_text()
    if file.suffix == ".rs":
        attribute = r"#\[(?:tokio::)?test\b[^\]]*\]"
        between = r"\s*(?:(?:#\[[^\]]*\]|//[^\n]*)\s*)*"
        return frozenset(re.findall(rf"{attribute}{between}(?:async )?fn (\w+)\(", text))
    # Also methods of the classes in which some tests are grouped.
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@functools.cache
def flags_of_horovodrun() -> frozenset[str]:
    from horovod.runner import flags

    return frozenset(option for action in flags.parser()._actions for option in action.option_strings)


def test_notes_name_files_that_are_there() -> None:
    for row in ROWS:
        for page in re.findall(r"\b([A-Z_]+\.md)\b", row["note"]):
            folders = (".", "docs", "compose/kubernetes", ".github")
            assert any((ROOT / folder / page).exists() for folder in folders), row
        for path in re.findall(r"\b((?:sdk-python|compose|plugins)/[\w./-]+\w)", row["note"]):
            assert (ROOT / path).exists(), row
        for name in re.findall(r"(?<![\w/.])(\w+\.(?:py|ipynb))\b", row["note"]):
            assert (ROOT / "sdk-python" / "examples" / name).exists(), row


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def line(row: dict[str, Any]) -> str:
    return f"| {cell(row['item'])} | {row['state']} | {cell(row['note'])} |\n"


def counts() -> str:
    """The table of counts, by group."""
    lines = ["| group | works | needless | not there |\n|---|---:|---:|---:|\n"]
    total: collections.Counter[str] = collections.Counter()
    for number, title in DATA["groups"].items():
        found = collections.Counter(row["state"] for row in ROWS if row["group"] == int(number))
        total += found
        lines.append(f"| {title} | {' | '.join(str(found[state]) for state in STATES)} |\n")
    return "".join([*lines, f"| **all** | {' | '.join(f'**{total[state]}**' for state in STATES)} |\n"])


def whole_page() -> str:
    sections = [HEAD, counts()]
    for number, title in DATA["groups"].items():
        rows = "".join(line(row) for row in ROWS if row["group"] == int(number))
        sections.append(f"\n## {title}\n\n| item | state | |\n|---|---|---|\n{rows}")
    return "".join(sections)


def part_of_migrating() -> str:
    """The counts, and all that does not work as in Horovod."""
    rows = "".join(line(row) for row in ROWS if row["state"] != "works")
    return f"{BEGIN}\n{counts()}\n| item | state | why |\n|---|---|---|\n{rows}\n{END}"


def test_the_tables_are_made_from_the_rows() -> None:
    text = MIGRATING.read_text()
    before, begin, rest = text.partition(BEGIN)
    assert begin, "docs/MIGRATING.md has lost the mark of the table"
    wanted = before + part_of_migrating() + rest.partition(END)[2]
    if os.environ.get("RONDE_REGENERATE") == "1":
        PAGE.write_text(whole_page())
        MIGRATING.write_text(wanted)
        text = wanted
    message = "run sdk-python/tests/test_coverage.py with RONDE_REGENERATE=1"
    assert PAGE.read_text() == whole_page(), message
    assert text == wanted, message
