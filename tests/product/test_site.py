"""What docs/site/hooks.py adds to the site of the documentation. `make docs` builds the site itself."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
HOOKS = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
SOURCES = "https://example.org/blob/main/"


def test_the_menu_has_each_page_once() -> None:
    menu = HOOKS["menu"]((ROOT / "docs" / "README.md").read_text())
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
    examples = sorted(path.name for path in (ROOT / "sdk-python" / "examples").glob("*.py"))
    assert re.findall(r"^## `(.+)`$", page, re.MULTILINE) == examples
    assert "ronde run -np 4 --sidecars 2 python sdk-python/examples/allreduce.py" in page
    assert "    import numpy as np" in page
