"""The names in docs/coverage.json, with their parameters: what the sources say of them, and what Python has.

A name is `horovod.torch.join`, or with parameters `horovod.torch.join(device=-1)`. Parameters are in their order, from
the first; one with `=` has this default. After `...` some are left out, and after `*` they are keywords, in any order.
Without `...`, a parameter that is not listed needs a default: the listed ones have to do for a call.

`check_in_sources` needs no framework. `check_imports` imports the names of one package, where that is installed: the
tests of each framework call it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import pathlib
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
SOURCES = [ROOT / "sdk-python" / "horovod-compat" / "src", ROOT / "sdk-python" / "python"]
DATA: dict[str, Any] = json.loads((ROOT / "docs" / "coverage.json").read_text())
ROWS: list[dict[str, Any]] = DATA["rows"]
NAMES = sorted({name for row in ROWS for name in row["names"]})
UNSHOWN = "<not shown>"
"""The default of a keyword that the sources show without it, such as one of a TypedDict."""


class Parameter(NamedTuple):
    """A parameter; `default` is its text, or None if the parameter is required."""

    name: str
    default: str | None
    is_positional: bool


class Found(NamedTuple):
    """What a name refers to: a statement of a module of ours, a whole module, or with None something of others."""

    module: str
    node: Any
    owner: Found | None = None


Seen = frozenset[tuple[str, str]]


def check_in_sources(name: str) -> None:
    """Fails if the sources do not have a name, or not with these parameters."""
    path, wanted = split(name)
    found = definition_of(path)
    if wanted is not None:
        compare(path, wanted, parameters(found))


def check_imports(package: str) -> None:
    """Imports all names of a package, such as `horovod.torch`, and fails for those that lack a listed parameter."""
    names = [name for name in NAMES if f"{split(name)[0]}.".startswith(f"{package}.")]
    assert names, f"docs/coverage.json has no name of {package}"
    failures = []
    for name in names:
        try:
            check_import(name)
        except (AssertionError, AttributeError, ImportError) as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n".join(failures)


def check_import(name: str) -> None:
    """Imports a name, and fails if it lacks a listed parameter."""
    path, wanted = split(name)
    value = imported(path)
    if wanted is None:
        return
    signature = list(inspect.signature(value).parameters.values())[is_method(path) :]
    objects = {name: default for name, _, default in (each.partition("=") for each in wanted) if default[:1].isalpha()}
    known = [
        as_parameter(each, objects.get(each.name), path)
        for each in signature
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if any(each.kind is each.VAR_KEYWORD for each in signature):
        # Only the sources show keywords that are forwarded.
        shown = {each.name for each in known}
        known += [each for each in parameters(definition_of(path)) if each.name not in shown]
    compare(path, wanted, known)


def split(name: str) -> tuple[str, list[str] | None]:
    path, bracket, rest = name.partition("(")
    return path, [each.strip() for each in rest[:-1].split(",") if each.strip()] if bracket else None


def compare(path: str, wanted: list[str], known: list[Parameter]) -> None:
    """Fails if the listed parameters are not among the known ones, as the text of this module says."""
    shown = ", ".join(each.name if each.default is None else f"{each.name}={each.default}" for each in known)
    position, mode, listed = 0, "", set()
    for each in wanted:
        if each in ("...", "*"):
            mode = each
            continue
        name, equals, default = each.partition("=")
        places = [number for number, other in enumerate(known) if other.name == name]
        assert places, f"{path} has no parameter {name}: ({shown})"
        place, listed = places[0], listed | {name}
        assert mode == "*" or place >= position, f"{path}: {name} is in another order: ({shown})"
        is_next = place == position and known[place].is_positional
        assert mode or is_next, f"{path}: {name} is at another place: ({shown})"
        assert not equals or alike(default, known[place].default), f"{path}: another default of {name}: ({shown})"
        position = place + 1
    if "..." not in wanted:
        required = [each.name for each in known if each.default is None and each.name not in listed]
        assert not required, f"{path} needs {required}, too: ({shown})"


def alike(wanted: str, known: str | None) -> bool:
    """Whether two texts of defaults are the same literal, or end with the same name."""
    if known is None:
        return False
    try:
        return repr(ast.literal_eval(wanted)) == repr(ast.literal_eval(known))
    except (ValueError, SyntaxError):
        return wanted.rpartition(".")[2] == known.rpartition(".")[2]


def as_parameter(given: inspect.Parameter, wanted: str | None, path: str) -> Parameter:
    """A parameter of a signature. `wanted` is the name that its default may have in the module of `path`."""
    is_positional = given.kind in (given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD)
    if given.default is given.empty:
        return Parameter(given.name, None, is_positional)
    if wanted is not None and wanted not in ("None", "True", "False"):
        is_it = imported(f"{path.rpartition('.')[0]}.{wanted}") is given.default
        return Parameter(given.name, wanted if is_it else UNSHOWN, is_positional)
    return Parameter(given.name, repr(given.default), is_positional)


def imported(path: str) -> Any:
    """What Python has under a dotted name."""
    parts = path.split(".")
    count = max((count for count in range(1, len(parts) + 1) if module_file(".".join(parts[:count]))), default=0)
    assert count, f"{path}: there is no such module"
    # A package's attribute may hide its module, as `horovod.run` does.
    value: Any = importlib.import_module(".".join(parts[:count]))
    for part in parts[count:]:
        value = getattr(value, part)
    return value


def is_method(path: str) -> bool:
    """Whether a name is a method, whose first parameter is its object."""
    owner, _, name = path.rpartition(".")
    found = None if module_file(owner) else imported(owner)
    return inspect.isclass(found) and inspect.isfunction(inspect.getattr_static(found, name))


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


@functools.cache
def top(module: str) -> list[Any]:
    """The statements of a module that are not within functions and classes, those first that count.

    The last one that binds a name counts, but what follows an `if` counts before its `else`, and `try` before `except`.
    """
    found: list[tuple[bool, int, ast.stmt]] = []
    pending: list[tuple[ast.stmt, bool]] = [(node, False) for node in parsed(module).body]
    while pending:
        node, is_other = pending.pop()
        found.append((is_other, -node.lineno, node))
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            others = [*getattr(node, "orelse", []), *(each for h in getattr(node, "handlers", []) for each in h.body)]
            pending += [(each, is_other) for each in node.body] + [(each, True) for each in others]
    return [node for _, _, node in sorted(found, key=lambda each: each[:2])]


def definition_of(path: str) -> Found:
    """The definition of a dotted name. Fails if there is none."""
    parts = path.split(".")
    count = max((count for count in range(1, len(parts) + 1) if module_file(".".join(parts[:count]))), default=0)
    assert count, f"{path}: there is no such module"
    module = ".".join(parts[:count])
    found: Found | None = Found(module, parsed(module))
    for number, part in enumerate(parts[count:], count + 1):
        assert found is not None
        found = attribute(found, part)
        assert found is not None, f"{path}: there is no {'.'.join(parts[:number])}"
    assert found is not None
    return found


def attribute(owner: Found, name: str) -> Found | None:
    """What a module or a class has under a name. Something of others has anything."""
    owner = target_of(owner)
    if owner.node is None:
        return owner
    if isinstance(owner.node, ast.Module):
        return find(owner.module, name)
    return member(owner, name)


def target_of(found: Found) -> Found:
    """What an assigned name refers to, where another name is assigned to it."""
    while isinstance(found.node, (ast.Assign, ast.AnnAssign)):
        if not isinstance(found.node.value, (ast.Name, ast.Attribute)):
            return found
        other = resolve(found.module, found.node.value)
        if other is None:
            return Found(found.module, None)
        found = other
    return found


def find(module: str, name: str, seen: Seen = frozenset()) -> Found | None:
    """What a module binds a name to; None if nothing."""
    if (module, name) in seen or module_file(module) is None:
        return None
    seen |= {(module, name)}
    for node in top(module):
        found = bound(module, node, name, seen)
        if found is not None:
            return found
    submodule = f"{module}.{name}"
    return Found(submodule, parsed(submodule)) if module_file(submodule) else None


def bound(module: str, node: Any, name: str, seen: Seen) -> Found | None:
    """What a statement binds a name to; None if nothing."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return Found(module, node) if node.name == name else None
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return Found(module, node) if assigns(node, name) else None
    if isinstance(node, ast.Import):
        return by_import(module, node, name)
    return by_from(module, node, name, seen) if isinstance(node, ast.ImportFrom) and node.module else None


def by_import(module: str, node: ast.Import, name: str) -> Found | None:
    """As `bound`, of `import a.b` and `import a.b as c`."""
    for alias in node.names:
        if (alias.asname or alias.name.partition(".")[0]) == name:
            path = alias.name if alias.asname else name
            return Found(path, parsed(path)) if module_file(path) else Found(module, None)
    return None


def by_from(module: str, node: ast.ImportFrom, name: str, seen: Seen) -> Found | None:
    """As `bound`, of `from a import b`. Without a file of `a`, it is something of another package."""
    source = str(node.module)
    for alias in node.names:
        if alias.name == "*":
            found = find(source, name, seen)
            if found is not None:
                return found
        elif (alias.asname or alias.name) == name:
            return find(source, alias.name, seen) if module_file(source) else Found(module, None)
    return None


def assigns(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    """Whether an assignment binds a name."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def resolve(module: str, expression: ast.expr) -> Found | None:
    """What a name in a module, with dots or without, refers to."""
    if isinstance(expression, ast.Name):
        return find(module, expression.id)
    if isinstance(expression, ast.Attribute):
        owner = resolve(module, expression.value)
        return None if owner is None else attribute(owner, expression.attr)
    return None


def bases(owner: Found) -> list[Found]:
    """The bases of a class that are ours."""
    found = [resolve(owner.module, base) for base in owner.node.bases]
    targets = [target_of(each) for each in found if each is not None]
    return [each for each in targets if isinstance(each.node, ast.ClassDef)]


def member(owner: Found, name: str) -> Found | None:
    """What a class defines under a name, itself or by its bases."""
    if not isinstance(owner.node, ast.ClassDef):
        return None
    for node in reversed(owner.node.body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return Found(owner.module, node, owner)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and assigns(node, name):
            return Found(owner.module, node, owner)
    return next(filter(None, (member(base, name) for base in bases(owner))), None)


def parameters(found: Found) -> list[Parameter]:
    """The parameters of a function or a class, in their order. Fails if the sources do not show them."""
    found = target_of(found)
    if isinstance(found.node, ast.FunctionDef):
        return of_function(found)
    assert isinstance(found.node, ast.ClassDef), f"{found.module}: the parameters cannot be determined"
    if any("dataclass" in ast.unparse(each) for each in found.node.decorator_list):
        return fields(found)
    made = member(found, "__init__")
    if made is not None:
        return parameters(made)
    foreign = [ast.unparse(base) for base in found.node.bases if ast.unparse(base) not in ("ABC", "object")]
    assert not foreign, f"{found.module}.{found.node.name}: the parameters of {foreign} cannot be determined"
    return []


def fields(found: Found) -> list[Parameter]:
    """The fields of a dataclass, or of a TypedDict, with those of its bases."""
    known = {each.name: each for base in bases(found) for each in fields(base)}
    for node in found.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            default = None if node.value is None else ast.unparse(node.value)
            known[node.target.id] = Parameter(node.target.id, default, is_positional=True)
    return list(known.values())


def of_function(found: Found) -> list[Parameter]:
    """The parameters of a function, with those that it forwards; without that for the object of a method."""
    arguments = found.node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[Any] = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    known = [of_argument(each, default, True) for each, default in zip(plain, defaults)]
    is_static = any(ast.unparse(each) == "staticmethod" for each in found.node.decorator_list)
    known = known[1:] if found.owner is not None and not is_static else known
    known += [of_argument(each, value, False) for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    names = {each.name for each in known}
    return known + [each for each in further(found) if each.name not in names]


def of_argument(argument: ast.arg, default: ast.expr | None, is_positional: bool) -> Parameter:
    return Parameter(argument.arg, None if default is None else ast.unparse(default), is_positional)


def further(found: Found) -> list[Parameter]:
    """The parameters that a function takes by `**name`: those of its annotation, or of what it forwards them to."""
    keywords = found.node.args.kwarg
    if keywords is None:
        return []
    annotation = keywords.annotation
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Unpack":
        described = resolve(found.module, annotation.slice)
        assert described is not None, f"{found.module}: {ast.unparse(annotation)} is not ours"
        return [Parameter(each.name, UNSHOWN, is_positional=False) for each in fields(described)]
    calls = [node for node in ast.walk(found.node) if isinstance(node, ast.Call)]
    forwarding = [call for call in calls if any(is_forwarded(each, keywords.arg) for each in call.keywords)]
    return [each for call in forwarding for each in of_call(found, call)]


def of_call(found: Found, call: ast.Call) -> list[Parameter]:
    """The parameters of the function of a call that the call does not give."""
    if ast.unparse(call.func) == "super().__init__":
        assert found.owner is not None
        target = next(filter(None, (member(base, "__init__") for base in bases(found.owner))), None)
    else:
        target = resolve(found.module, call.func)
    # Another object's function, such as one that is chosen at run time, shows nothing.
    if target is None or not isinstance(target_of(target).node, (ast.FunctionDef, ast.ClassDef)):
        return []
    has_more = any(isinstance(each, ast.Starred) for each in call.args)
    given = {each.arg for each in call.keywords}
    rest = parameters(target)[sum(not isinstance(each, ast.Starred) for each in call.args) :]
    return [each._replace(is_positional=has_more and each.is_positional) for each in rest if each.name not in given]


def is_forwarded(keyword: ast.keyword, name: str) -> bool:
    return keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == name
