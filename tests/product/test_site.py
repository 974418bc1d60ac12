"""The site of the documentation: what docs/site/hooks.py adds to it, and that its pages load nothing from elsewhere."""

from __future__ import annotations

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import textwrap

import pytest
from blocks import of_section

ROOT = pathlib.Path(__file__).parent.parent.parent
HOOKS = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
SOURCES = "https://example.org/blob/main/"
INDEX = ROOT / "docs" / "README.md"
ENVIRONMENT = ROOT / "tests" / "setup" / "environment.py"
# What a browser loads, or connects to, without a click of its reader.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc=["']?(?:https?:)?//"""
    r"""|<link\b(?![^>]*\brel=["']?canonical)[^>]*\shref=["']?(?:https?:)?//|@import"""
)
# What the theme's script asks GitHub for the stars of a repository by, and what it loads a library from unpkg.com for.
ASKED = re.compile(r"""data-md-component=["']?source\b|class=["']?mermaid""")
WORKFLOW = ROOT / ".github" / "workflows" / "docs.yml"


def test_the_menu_has_each_page_once() -> None:
    menu = HOOKS["menu"](INDEX.read_text())
    pages = [page for section in menu for entries in section.values() for page in entries]
    existing = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")]
    assert sorted(pages) == sorted([*existing, HOOKS["GALLERY"]])


def test_links_out_of_the_folder_lead_to_the_sources() -> None:
    inside = "[b](../ELASTIC.md#limits) [c](0002-sub-schedules.md) ![d](../overview.svg) [e](https://x.org/../y)"
    assert HOOKS["outside_links"](inside, "adr/0001-bucket-independent-bits.md", SOURCES) == inside
    rewritten = HOOKS["outside_links"]("[a](../plugins/README.md#x) [c](GPU.md#y)", "PLUGINS.md", SOURCES)
    assert rewritten == f"[a]({SOURCES}plugins/README.md#x) [c](GPU.md#y)"


def test_a_link_to_no_file_ends_the_build() -> None:
    with pytest.raises(ValueError, match=r"WEB\.md links to \.\./nothing, which does not exist"):
        HOOKS["outside_links"]("[a](../nothing)", "WEB.md", SOURCES)


def test_the_gallery_shows_each_example_with_its_source() -> None:
    page = HOOKS["gallery"](ROOT / "sdk-python" / "examples")
    folder = ROOT / "sdk-python" / "examples"
    examples = sorted(path.name for pattern in ("*.py", "*.ipynb") for path in folder.glob(pattern))
    assert re.findall(r"^## `(.+)`$", page, re.MULTILINE) == examples
    assert "ronde run -np 4 --sidecars 2 python sdk-python/examples/allreduce.py" in page
    assert "    import numpy as np" in page


def test_the_gallery_shows_the_cells_of_a_notebook() -> None:
    cells = [
        ("markdown", ["# Train here\n", "\n", "It needs ronde.\n"]),
        ("markdown", ["## Look\n", "At it."]),
        ("code", ["x = 1\n", "# not a heading"]),
    ]
    source = json.dumps({"cells": [{"cell_type": kind, "source": lines} for kind, lines in cells]})
    shown = HOOKS["notebook"](source)
    assert shown == ("Train here.", "It needs ronde.", "**Look**\nAt it.\n\n```python\nx = 1\n# not a heading\n```")


def test_each_page_of_use_with_begins_with_a_command() -> None:
    menu = {title: pages for section in HOOKS["menu"](INDEX.read_text()) for title, pages in section.items()}
    names = ("TORCHRUN", "SLURM", "LIGHTNING", "ACCELERATE", "KUBERNETES", "RAY", "SPARK")
    assert menu["Use with"] == [f"{name}.md" for name in names]
    for page in menu["Use with"]:
        text = (ROOT / "docs" / page).read_text()
        assert "\n\nThis page answers how to " in text, f"{page} does not begin with what it answers"
        first = re.search(r"(?m)^## (.+)$", text)
        assert first, page
        languages = [block.language for block in of_section(ROOT / "docs" / page, first[1])]
        assert "sh" in languages, f"the first section of {page} has no command"


def test_the_pages_load_nothing_from_other_sites(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, str(ENVIRONMENT), "docs"], check=True)
    path = subprocess.run(
        [sys.executable, str(ENVIRONMENT), "path", "docs"], check=True, capture_output=True, text=True
    )
    site = tmp_path / "site"
    build = [path.stdout.strip(), "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, check=False, capture_output=True, text=True, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    assert 'class="md-source" href=' in pages["index.html"], "the link to the repository is gone"
    assert [name for name, text in pages.items() if LOADED.search(text) or ASKED.search(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://github.com/x" data-md-component="source">',
        "<a href=https://github.com/x data-md-component=source>",
        '<script async src="https://example.org/a.js">',
        '<link rel="preconnect" href="https://fonts.gstatic.com">',
        '<img alt="" src="//example.org/a.png">',
        '<pre class="mermaid">',
    ],
)
def test_what_a_page_would_load_is_found(text: str) -> None:
    assert LOADED.search(text) or ASKED.search(text)
    assert not LOADED.search('<link rel="canonical" href="https://example.org/"><a href="https://example.org">')


@pytest.mark.parametrize(
    ("kind", "name", "versions", "default"),
    [
        ("branch", "main", "[]", "set-default --push dev"),
        ("branch", "main", '[{"version": "1.0.0", "aliases": ["latest"]}]', None),
        ("tag", "v1.0.0", "[]", "set-default --push latest"),
    ],
)
def test_the_site_has_a_start_page_before_the_first_release(
    kind: str, name: str, versions: str, default: str | None, tmp_path: pathlib.Path
) -> None:
    """Runs the step that publishes, with programs in the place of git and mike that only write down their arguments."""
    calls = tmp_path / "calls"
    programs = {
        "system/git": "true",
        "system/python3": f"echo {tmp_path}/environment/python",
        "environment/mkdocs": "true",
        # The real one builds the site with the mkdocs of PATH.
        "environment/mike": f"set -e; mkdocs; echo \"$*\" >>{calls}; echo '{versions}'",
    }
    for program, commands in programs.items():
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).write_text(f"#!/bin/sh\n{commands}\n")
        (tmp_path / program).chmod(0o755)
    step = textwrap.dedent(WORKFLOW.read_text().partition("- name: Publish")[2].partition("run: |\n")[2])
    variables = {"PATH": f"{tmp_path}/system:/usr/bin:/bin", "REF_TYPE": kind, "REF_NAME": name}
    subprocess.run(["bash", "-e", "-c", step], check=True, env=variables, cwd=tmp_path)
    assert [call for call in calls.read_text().splitlines() if "set-default" in call] == ([default] if default else [])
