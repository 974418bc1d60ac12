"""docs/coverage.json: what of Horovod's documentation there is. Its names are looked up in the sources, so that no
framework has to be installed, and the tables of docs/COVERAGE.md and docs/MIGRATING.md are made from it.

RONDE_REGENERATE=1 writes these tables. To change a state, change the row in docs/coverage.json.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
from typing import Any, Union

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SOURCES = [ROOT / "sdk-python" / "horovod-compat" / "src", ROOT / "sdk-python" / "python"]
DATA: dict[str, Any] = json.loads((ROOT / "docs" / "coverage.json").read_text())
ROWS: list[dict[str, Any]] = DATA["rows"]
STATES = ("works", "needless", "not there")
PAGE, MIGRATING = ROOT / "docs" / "COVERAGE.md", ROOT / "docs" / "MIGRATING.md"
BEGIN, END = "<!-- coverage: made from coverage.json -->\n", "<!-- coverage: end -->\n"
HEAD = """# Coverage of Horovod

This page answers what of Horovod's documentation there is here, row by row. It is made from
[coverage.json](coverage.json) by `sdk-python/tests/test_coverage.py`, which also looks each name up; do not edit it.

*works*: does what that documentation says. *needless*: has no counterpart by design, for the reason beside it. *not
there*: does not work, for the reason beside it.

"""
Definition = Union[ast.FunctionDef, ast.ClassDef]


@functools.cache
def module_file(name: str) -> pathlib.Path | None:
    """The file of a module, if it is one of ours."""
    for source in SOURCES:
        path = source.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


@functools.cache
def parsed(name: str) -> ast.Module:
    file = module_file(name)
    assert file is not None, name
    return ast.parse(file.read_text())


def find(module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Any:
    """The statement that defines a name of a module, or True for a module of this name; None if there is none."""
    if (module, name) in seen or module_file(module) is None:
        return None
    seen |= {(module, name)}
    stars: list[str] = []
    # The last one counts; what is under `if` and `try` counts, too.
    for node in reversed(list(ast.walk(parsed(module)))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name and node in top(module):
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.name == "*":
                    stars.append(node.module)
                elif (alias.asname or alias.name) == name and node in top(module):
                    found = find(node.module, alias.name, seen)
                    if found is not None:
                        return found
                    # The module of the same name that the statement binds, or something of another package.
                    submodule = f"{node.module}.{alias.name}"
                    return True if module_file(submodule) or not module_file(node.module) else None
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node in top(module):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
    found = next(filter(None, (find(star, name, seen) for star in stars)), None)
    return found or (True if module_file(f"{module}.{name}") else None)


@functools.cache
def top(module: str) -> frozenset[ast.AST]:
    """The statements of a module that are not within functions and classes."""
    found: list[ast.AST] = []
    pending: list[ast.AST] = [parsed(module)]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            found.append(node)
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                pending.append(node)
    return frozenset(found)


def definition_of(path: str) -> tuple[str, Any]:
    """The module and the definition of a dotted name. Fails if there is none."""
    parts = path.split(".")
    count = max((count for count in range(1, len(parts) + 1) if module_file(".".join(parts[:count]))), default=0)
    module, rest = ".".join(parts[:count]), parts[count:]
    assert module, f"{path}: there is no such module"
    found: Any = True
    for number, part in enumerate(rest):
        if number == 0:
            found = find(module, part)
            if found is True and len(rest) > 1:
                return module, True  # a name of another package
        else:
            found = member(module, found, part)
        assert found is not None, f"{path}: {module} has no {'.'.join(rest[: number + 1])}"
        while isinstance(found, ast.Assign) and isinstance(found.value, ast.Name):
            found = find(module, found.value.id)
    return module, found


def member(module: str, owner: Any, name: str) -> Any:
    """What a class defines under a name, itself or by its bases."""
    if not isinstance(owner, ast.ClassDef):
        return None
    for node in owner.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node
    for base in owner.bases:
        if isinstance(base, ast.Name):
            found = member(module, anywhere(base.id), name)
            if found is not None:
                return found
    return None


@functools.cache
def anywhere(name: str) -> Any:
    """A class of ours with this name."""
    for source in SOURCES:
        for file in source.rglob("*.py"):
            if f"class {name}" in file.read_text():
                for node in ast.parse(file.read_text()).body:
                    if isinstance(node, ast.ClassDef) and node.name == name:
                        return node
    return None


def parameters(definition: Any) -> set[str] | None:
    """The parameters of a function or a class; None if the source does not show them."""
    if isinstance(definition, ast.ClassDef):
        made = member("", definition, "__init__")
        return parameters(made) if made is not None else None
    if not isinstance(definition, ast.FunctionDef):
        return None
    arguments = definition.args
    if arguments.kwarg is not None:
        return None
    return {each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}


def split(name: str) -> tuple[str, list[str] | None]:
    path, bracket, rest = name.partition("(")
    return path, [each.strip() for each in rest.rstrip(")").split(",") if each.strip()] if bracket else None


NAMES = sorted({name for row in ROWS for name in row["names"]})


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_there_with_its_parameters(name: str) -> None:
    path, wanted = split(name)
    _, definition = definition_of(path)
    known = parameters(definition)
    if wanted and known is not None:
        assert set(wanted) <= known, f"{path} has {sorted(known)}"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("horovod.torch.")])
def test_what_the_sources_show_is_what_python_has(name: str) -> None:
    """With PyTorch, which is installed here, also by importing."""
    path, wanted = split(name)
    parts = path.split(".")
    found: Any = importlib.import_module("horovod.torch")
    for part in parts[2:]:
        found = getattr(found, part)
    if wanted:
        assert set(wanted) <= set(inspect.signature(found).parameters)


@pytest.mark.parametrize(
    "name",
    [
        "horovod.torch.nothing",
        "horovod.nothing.init",
        "horovod.torch.allreduce(nothing)",
        "horovod.torch.Compression.nothing",
        "horovod.tensorflow.allreduce(nothing)",
        "horovod.ray.RayExecutor(nothing)",
    ],
)
def test_a_name_that_is_not_there_fails(name: str) -> None:
    with pytest.raises(AssertionError):
        test_a_name_is_there_with_its_parameters(name)


def test_rows_are_complete() -> None:
    groups = [row["group"] for row in ROWS]
    assert sorted(set(groups)) == list(range(1, 24))
    assert set(DATA["groups"]) == {str(group) for group in set(groups)}
    items = [(row["group"], row["item"]) for row in ROWS]
    assert len(set(items)) == len(items)
    for row in ROWS:
        assert row["state"] in STATES, row
        assert row["note"] or row["state"] == "works", f"{row['item']}: {row['state']} needs its sentence"
        assert set(row) == {"group", "item", "state", "note", "names"}


def test_notes_name_files_that_are_there() -> None:
    for row in ROWS:
        for page in re.findall(r"\b([A-Z_]+\.md)\b", row["note"]):
            assert any((ROOT / folder / page).exists() for folder in (".", "docs", "compose/kubernetes")), row
        for path in re.findall(r"\b((?:sdk-python|compose|plugins)/[\w./-]+\w)", row["note"]):
            assert (ROOT / path).exists(), row


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
