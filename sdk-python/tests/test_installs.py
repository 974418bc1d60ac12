"""Commands that install ronde name its wheel: the package of that name on PyPI would be somebody else's."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re

import pytest

from ronde.frameworks import requirement

ROOT = pathlib.Path(__file__).parent.parent.parent
# The name alone, with or without an extra; a path to the wheel has a slash or a hyphen beside it.
_BY_NAME = re.compile(r"""pip3?\\? install [^`\n#]*?(?<![\w/.-])(?:ronde|horovod[-_]compat)(?![\w/.*-])""")
_FOLDERS = ("docs", "sdk-python/python", "sdk-python/horovod-compat", "sdk-python/examples", "compose", "deploy")
_KINDS = {".md", ".py", ".ipynb", ".yaml", ".yml", ".toml", ".json", ".sh", ".def"}


def pages() -> list[pathlib.Path]:
    """The files that users read, and those whose texts they see."""
    found = [ROOT / "README.md", ROOT / "sdk-python" / "README.md"]
    for folder in _FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in _KINDS or path.name == "Dockerfile"]
    return found


def extras(name: str) -> list[str]:
    """What an extra of the package installs."""
    text = (ROOT / "sdk-python" / "pyproject.toml").read_text()
    (listed,) = re.findall(rf"(?m)^{name} = (\[.*\])$", text)
    return list(ast.literal_eval(listed))


def test_no_page_and_no_text_installs_ronde_from_an_index() -> None:
    for wrong in ("pip install ronde", 'pip install "ronde[torch]"', "pip install --force-reinstall ronde)"):
        assert _BY_NAME.search(wrong), wrong
    for right in ("pip install dist/ronde-*.whl", 'pip install "$(ls dist/ronde-*.whl)[ray]"', "pip install ./ronde"):
        assert not _BY_NAME.search(right), right
    found = {str(path.relative_to(ROOT)): _BY_NAME.findall(path.read_text(errors="replace")) for path in pages()}
    assert {path: texts for path, texts in found.items() if texts} == {}


def test_the_error_without_a_framework_names_what_the_extra_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    for name in requirement.PACKAGES:
        packages = " ".join(f'"{each}"' for each in extras(name))
        command = re.escape(f"pip install {packages} (the extra `{name}` of ronde's wheel)")
        with pytest.raises(ImportError, match=rf"needs It, which is not installed: {command}$"):
            requirement.require(name, "It")


def test_elastic_jobs_of_ray_and_spark_have_what_pickles_functions() -> None:
    (needed,) = extras("run")
    assert needed.startswith("cloudpickle")
    assert needed in extras("ray")
    assert needed in extras("spark")
