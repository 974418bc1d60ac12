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


def run_by(workflow: str) -> set[str]:
    """The recipes that a workflow runs: those of its matrix, and those of its commands."""
    listed = [name for names in re.findall(r"(?m)^ +recipe: \[(.+)\]$", workflow) for name in names.split(", ")]
    return {
        *listed,
        *re.findall(r"{.*\brecipe: ([a-z-]+)", workflow),
        *re.findall(r"(?m)run: .*\bmake ([a-z-]+)$", workflow),
    }


def test_comments_and_conditions_run_no_recipe() -> None:
    workflow = """
        # The longest is c-test.
        recipe: [a-test, b-test]
          - {os: ubuntu-24.04, recipe: d-test, require: ""}
      - if: matrix.recipe == 'e-test'
      - run: sudo make f-test
    """
    assert run_by(workflow) == {"a-test", "b-test", "d-test", "f-test"}


def test_each_recipe_that_is_left_out_has_a_schedule() -> None:
    recipes = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    texts = [path.read_text() for path in WORKFLOWS.glob("*.yml")]
    scheduled = [text for text in texts if re.search(r"(?m)^  schedule:$", text) and "workflow_dispatch:" in text]
    for recipe in left_out():
        assert recipe in recipes
        assert any(recipe in run_by(text) for text in scheduled), recipe
