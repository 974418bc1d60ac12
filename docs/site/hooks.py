"""What the site of the documentation has beside the pages in docs/: its menu, the gallery of examples, links out.

mkdocs calls the functions named `on_...`; mkdocs.yml names this file. The others are pure.
"""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import posixpath
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "sdk-python" / "examples"
GALLERY = "EXAMPLES.md"
HEADING = re.compile(r"(?m)^#+ (.+)$")
# A page in a table of the index. Those of adr/ have their own section, and the quickstart is in the first one.
PAGE = re.compile(r"\| \[[^\]]+\]\(((?!\.|adr/|QUICKSTART\.md)[^)#]+)\) \|")
LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the menu."""
    config.nav = menu((ROOT / "docs" / "README.md").read_text())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the gallery of examples."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, GALLERY, content=gallery(EXAMPLES)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrites links to files outside of docs/."""
    return outside_links(markdown, page.file.src_uri, f"{config.repo_url}/blob/main/")


def menu(index: str) -> list[Any]:
    """The menu: each bold line of the index is a section, and the links in the first cells below it are its pages.

    A link with an anchor names a part of a page that is listed elsewhere, so it is left out.
    """
    sections: list[Any] = [{"Start": ["README.md", "QUICKSTART.md", GALLERY]}]
    for line in index.splitlines():
        if title := re.fullmatch(r"\*\*(.+)\*\*", line):
            sections.append({title[1]: []})
        elif row := PAGE.match(line):
            next(iter(sections[-1].values())).append(row[1])
    decisions = sorted(path.name for path in (ROOT / "docs" / "adr").glob("0*.md"))
    return [*sections, {"Decisions": ["adr/README.md", *(f"adr/{name}" for name in decisions)]}]


def outside_links(markdown: str, page: str, sources: str) -> str:
    """A page's text, with links to files outside of docs/ leading to `sources`, the address of the repository's files.

    Raises ValueError, which ends the build, for a link to a file that does not exist.
    """
    return LINK.sub(functools.partial(outside_link, page=page, sources=sources), markdown)


def outside_link(link: re.Match[str], page: str, sources: str) -> str:
    """One link, rewritten if it leads out of docs/."""
    opening, target, anchor, end = link.groups()
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    if "://" in target or path.startswith("docs/"):
        return link[0]
    if not (ROOT / path).exists():
        raise ValueError(f"{page} links to {target}, which does not exist")
    return f"{opening}{sources}{path}{anchor or ''}{end}"


def gallery(folder: pathlib.Path) -> str:
    """The page with all examples: of each the first sentence of its documentation, how to start it, and its source."""
    parts = ["# Examples", "", "The programs and notebooks in `sdk-python/examples`, with their sources.", ""]
    for path in sorted(path for path in folder.iterdir() if path.suffix in {".py", ".ipynb"}):
        shown = program(path.read_text()) if path.suffix == ".py" else notebook(path.read_text())
        parts += [f"## `{path.name}`", "", shown.first, ""]
        if shown.rest:
            parts += [shown.rest, ""]
        indented = "\n".join(f"    {line}" if line else "" for line in shown.source.splitlines())
        parts += [f'??? example "{path.name}"', "", indented, ""]
    return "\n".join(parts)


class Shown(NamedTuple):
    """What the gallery shows of an example, in Markdown."""

    first: str
    rest: str
    source: str


def program(source: str) -> Shown:
    """A program: the lines of its documentation, then its source."""
    text = ast.get_docstring(ast.parse(source)) or ""
    first, _, rest = text.partition("\n")
    return Shown(first, f"```text\n{rest.strip()}\n```" if rest.strip() else "", python(source))


def notebook(source: str) -> Shown:
    """A notebook: the title and the text of its first cell, then the other cells; their headings are bold lines."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(source)["cells"]]
    title, _, text = cells[0][1].partition("\n")
    shown = [python(cell) if kind == "code" else HEADING.sub(r"**\1**", cell) for kind, cell in cells[1:]]
    return Shown(title.removeprefix("# ") + ".", text.strip(), "\n\n".join(shown))


def python(source: str) -> str:
    """A block of Python."""
    return f"```python\n{source.rstrip()}\n```"
