"""compose/kubernetes/VALUES.md: the table of the chart's values, made from values.yaml and its schema."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from conftest import CHART, ROOT

PAGE = ROOT / "compose" / "kubernetes" / "VALUES.md"
HEAD = """# Values of the chart

Made from `chart/values.yaml` and `chart/values.schema.json`; do not edit. `tests/deploy/test_values.py` makes this page
with RONDE_REGENERATE=1. [README.md](README.md) says what to set first.

| value | default | allowed | what |
|---|---|---|---|
"""


class Value:
    """A line of values.yaml: its path, its default as text, and the comments above and beside it."""

    def __init__(self, path: str, default: str, comment: str) -> None:
        self.path, self.default, self.comment = path, default, comment


def values(text: str) -> list[Value]:
    """The values, without a parser of YAML: the file has two spaces for each level, and comments above or beside."""
    found: list[Value] = []
    above: list[str] = []
    stack: list[str] = []
    for line in text.splitlines():
        if not line.strip():
            above = []
            continue
        indent, rest = (len(line) - len(line.lstrip())) // 2, line.strip()
        if rest.startswith("#"):
            above.append(rest.lstrip("# "))
            continue
        matched = re.fullmatch(r"([\w-]+):(?: ((?:[^#]|(?<! )#)*?))?(?: +# (.+))?", rest)
        assert matched is not None, line
        stack[indent:] = [matched[1]]
        found.append(Value(".".join(stack), matched[2] or "", " ".join([*above, matched[3] or ""]).strip()))
        above = []
    return found


def resolved(schema: Any, root: Any) -> Any:
    if "$ref" in schema:
        found = root
        for part in schema["$ref"].lstrip("#/").split("/"):
            found = found[part]
        return found
    return schema


def allowed(path: str, root: Any) -> str | None:
    """What the schema allows for a value, in words; None if it does not know the value."""
    schema = root
    for part in path.split("."):
        properties = resolved(schema, root).get("properties")
        if properties is None:
            return ""  # a free-form object, such as resources
        if part not in properties:
            return None
        schema = properties[part]
    schema = resolved(schema, root)
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    kind = {"integer": "a number", "boolean": "true or false", "string": "text", "array": "a list"}.get(
        schema.get("type"), ""
    )
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None:
        kind += f" from {low}" + (f" to {high}" if high is not None else "")
    return kind


def page() -> str:
    root = json.loads((CHART / "values.schema.json").read_text())
    rows = []
    for value in values((CHART / "values.yaml").read_text()):
        if not value.default and not value.comment:
            continue  # a group
        limits = allowed(value.path, root)
        assert limits is not None, f"the schema does not know {value.path}"
        default = f"`{value.default}`" if value.default else ""
        rows.append(f"| `{value.path}` | {default} | {limits} | {value.comment} |\n".replace("  ", " "))
    return HEAD + "".join(rows)


def test_the_table_is_that_of_the_chart() -> None:
    made = page()
    if os.environ.get("RONDE_REGENERATE") == "1":
        PAGE.write_text(made)
    assert PAGE.read_text() == made, "VALUES.md is out of date; run this test with RONDE_REGENERATE=1"


def test_every_value_of_the_schema_has_a_row() -> None:
    root = json.loads((CHART / "values.schema.json").read_text())
    rows = set(re.findall(r"(?m)^\| `([\w.]+)` \|", PAGE.read_text()))

    def leaves(schema: Any, path: str) -> list[str]:
        schema = resolved(schema, root)
        if "properties" in schema:
            return [leaf for name, each in schema["properties"].items() for leaf in leaves(each, f"{path}.{name}")]
        return [path.lstrip(".")]

    def has_row(leaf: str) -> bool:
        return any(row == leaf or row.startswith(f"{leaf}.") for row in rows)

    assert [leaf for leaf in leaves(root, "") if leaf != "global" and not has_row(leaf)] == []
