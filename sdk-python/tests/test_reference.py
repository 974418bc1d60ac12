"""docs/PYTHON_API.md matches the package's docstrings."""

from __future__ import annotations

import inspect
import os
import pathlib
import runpy

import pytest

pytest.importorskip("torch")
PACKING = pathlib.Path(__file__).parent.parent / "packing"
REFERENCE = runpy.run_path(str(PACKING / "reference.py"))


def test_the_page_is_up_to_date() -> None:
    made = REFERENCE["reference"]()
    if os.environ.get("RONDE_REGENERATE") == "1":
        REFERENCE["FILE"].write_text(made)
    assert REFERENCE["FILE"].read_text() == made, (
        "docs/PYTHON_API.md differs from the docstrings; run python sdk-python/packing/reference.py"
    )


def documented(
    tensor: object, *rest: int, name: str | None = None, op: int = 3, kind: type = dict, **more: object
) -> list[int]:
    """One line.

        ronde.example(
            1)

    tensor -- the first,
              on two lines
    name   -- the second

    And a word.
    """
    raise AssertionError(tensor, rest, name, op, kind, more)


def test_signatures_and_documentation_become_markdown() -> None:
    assert REFERENCE["signature"]("documented", documented) == (
        "documented(\n    tensor: object,\n    *rest: int,\n    name: str | None = None,\n    op: int = 3,\n"
        "    kind: type = dict,\n    **more: object,\n) -> list[int]"
    )
    assert REFERENCE["prose"](inspect.getdoc(documented)) == (
        "One line.\n\n```text\nronde.example(\n    1)\n```\n\n- `tensor`: the first,\n  on two lines\n"
        "- `name`: the second\n\nAnd a word."
    )


def test_every_exported_name_has_a_docstring() -> None:
    page = REFERENCE["FILE"].read_text()
    for heading, following in zip(page.split("\n#")[1:], page.split("\n#")[2:]):
        assert len(heading.splitlines()) > 1 or following.startswith("#"), heading
        assert not heading.rstrip().endswith("```"), f"no documentation: {heading}"
