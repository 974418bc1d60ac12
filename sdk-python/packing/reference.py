"""Generates docs/PYTHON_API.md from the docstrings of exported names: `python reference.py [FILE]`.

A test compares the file with this program's output.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

FILE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "PYTHON_API.md"
MODULES = [
    "ronde",
    "ronde.torch",
    "ronde.torch.distributed",
    "ronde.torch.elastic",
    "ronde.elastic",
    "ronde.data",
    "ronde.monitor",
]
HEAD = """# The Python API

`sdk-python/packing/reference.py` generates this page from the package's docstrings; do not edit it. A name that several
modules export is described in the first of them. For scripts written for Horovod, read [MIGRATING.md](MIGRATING.md).
"""
WIDTH_MAX = 110
# `name -- text`, and further lines of that text with the same indentation.
ITEM = re.compile(r"^([\w*][\w*., ]*?) +-- (.*)$")


def reference() -> str:
    """Returns the whole page."""
    parts, seen = [HEAD], {}
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"\n## `{name}`\n\n{prose(inspect.getdoc(module) or '')}\n")
        parts += entries(module, seen)
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).rstrip() + "\n"


def entries(module: ModuleType, seen: dict[int, str]) -> Iterator[str]:
    """Yields an entry for each exported name of a module, or a link if it is described already."""
    again = []
    for name in sorted(module.__all__, key=lambda name: (not name[0].isupper(), name)):
        value = getattr(module, name)
        # Numbers may be equal by chance.
        is_described = inspect.isclass(value) or inspect.isroutine(value)
        if is_described and id(value) in seen:
            again.append(f"`{name}` ({seen[id(value)]})")
            continue
        seen[id(value)] = f"`{module.__name__}`"
        yield entry(name, value)
    if again:
        yield f"\nAlso: {', '.join(again)}.\n"


def entry(name: str, value: Any, level: int = 3) -> str:
    """Returns a heading with its signature and documentation."""
    heading = f"\n{'#' * level} {name}\n\n"
    if inspect.ismodule(value):
        return f"{heading}The module `{value.__name__}`, below.\n"
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"{heading}{constant(value)}\n"
    text = f"{heading}```text\n{signature(name, value)}\n```\n\n{prose(inspect.getdoc(value) or '')}\n"
    if inspect.isclass(value) and not issubclass(value, Warning):
        text += "\n" + "".join(members(value))
    return text


def members(kind: type) -> Iterator[str]:
    """Yields documented properties and methods of a class and its bases in this package; properties first."""
    methods = []
    for name in (name for name in dir(kind) if not name.startswith("_")):
        owner = next(base for base in kind.__mro__ if name in vars(base))
        found = inspect.getattr_static(kind, name)
        value = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        if not owner.__module__.startswith("ronde"):
            continue
        if isinstance(value, property):
            yield f"- **`{name}`** (property): {in_line(value.__doc__)}\n"
        elif inspect.isfunction(value):
            documentation = prose(inspect.cleandoc(value.__doc__ or ""))
            shown = signature(name, value)
            methods.append(f"\n#### {kind.__name__}.{name}\n\n```text\n{shown}\n```\n\n{documentation}\n")
    yield from methods


def signature(name: str, value: Any) -> str:
    """Returns a signature as in a definition, with one argument per line if it is long."""
    try:
        found = inspect.signature(value)
    except ValueError:
        return name
    parameters = [parameter for parameter in found.parameters.values() if parameter.name not in {"self", "cls"}]
    shown = []
    for index, parameter in enumerate(parameters):
        is_first = all(before.kind is not parameter.KEYWORD_ONLY for before in parameters[:index])
        is_bare = all(before.kind is not parameter.VAR_POSITIONAL for before in parameters[:index])
        if parameter.kind is parameter.KEYWORD_ONLY and is_first and is_bare:
            shown.append("*")
        shown.append(argument(parameter))
    result = found.return_annotation
    arrow = "" if result is found.empty or inspect.isclass(value) else f" -> {annotation(result)}"
    line = f"{name}({', '.join(shown)}){arrow}"
    if len(line) <= WIDTH_MAX:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){arrow}"


def argument(parameter: inspect.Parameter) -> str:
    """Returns one argument with its type and default."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    typed = "" if parameter.annotation is parameter.empty else f": {annotation(parameter.annotation)}"
    default = (
        "" if parameter.default is parameter.empty else f"{' = ' if typed else '='}{default_of(parameter.default)}"
    )
    return f"{stars}{parameter.name}{typed}{default}"


def annotation(value: Any) -> str:
    """Returns a type as written in the source."""
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def default_of(value: Any) -> str:
    """Returns a default without addresses: exported objects and classes by name, other objects by class."""
    modules = (importlib.import_module(name) for name in MODULES)
    names = [name for module in modules for name in module.__all__ if getattr(module, name) is value]
    # Numbers may be equal by chance.
    if names and not isinstance(value, (int, float, str)):
        return names[0]
    if inspect.isclass(value):
        return value.__qualname__
    if value is None or isinstance(value, (bool, int, float, str, tuple, list, dict)):
        return repr(value)
    return f"<{type(value).__name__}>"


def constant(value: Any) -> str:
    """Returns the entry of a constant."""
    if isinstance(value, (bool, int, float, str)) and not hasattr(value, "__dict__"):
        return "A constant." if isinstance(value, str) else f"The constant `{value!r}`."
    return f"An object of `{type(value).__name__}`."


def prose(text: str) -> str:
    """Converts documentation to Markdown: `name -- text` to items, indented lines to code."""
    lines: list[str] = []
    is_code, item_indent = False, None
    for line in text.splitlines():
        match = ITEM.match(line)
        if is_code and line and not line.startswith("    "):
            lines, is_code = [*without_blank_end(lines), "```", ""], False
        if match:
            item_indent = len(line) - len(match[2])
            lines += [""] if lines and lines[-1] and not lines[-1].startswith(("- ", "  ")) else []
            lines.append(f"- `{match[1]}`: {match[2]}")
        elif item_indent and line.startswith(" " * min(item_indent, 4)):
            lines.append(f"  {line.strip()}")
        elif line.startswith("    ") and not is_code:
            lines += ["```text", line[4:]]
            is_code, item_indent = True, None
        else:
            lines += [""] if line and item_indent else []
            lines.append(line[4:] if is_code else line)
            item_indent = None
    return "\n".join([*without_blank_end(lines), "```"] if is_code else lines)


def without_blank_end(lines: list[str]) -> list[str]:
    """Returns the lines without trailing blank ones."""
    return lines[: max((index for index, line in enumerate(lines, 1) if line.strip()), default=0)]


def in_line(text: str | None) -> str:
    """Returns documentation without line breaks."""
    return " ".join((text or "").split())


if __name__ == "__main__":
    pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(reference())
