"""Recipes that `.ci/run` leaves out: a workflow with a schedule runs each of them."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent.parent
RUN = ROOT / ".ci" / "run"
WORKFLOWS = ROOT / ".github" / "workflows"


def left_out() -> list[str]:
    """Those that it never runs, and those that it runs if there is time."""
    text = RUN.read_text()
    never = re.search(r"(?m)^left_out=\((.+)\)$", text)
    late = re.search(r"(?m)^for entry in (.+); do$", text)
    assert never is not None
    assert late is not None
    return [*never[1].split(), *(entry.partition(":")[0] for entry in late[1].split())]


def test_each_recipe_that_is_left_out_has_a_schedule() -> None:
    recipes = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    texts = [path.read_text() for path in WORKFLOWS.glob("*.yml")]
    scheduled = [text for text in texts if re.search(r"(?m)^  schedule:$", text) and "workflow_dispatch:" in text]
    for recipe in left_out():
        assert recipe in recipes
        assert any(re.search(rf"(?<![\w-]){recipe}(?![\w-])", text) for text in scheduled), recipe
