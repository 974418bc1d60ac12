"""compose/apptainer/ronde.def: a parser of our own for its form. Apptainer is in no package of Debian."""

from __future__ import annotations

import re
import subprocess

import pytest
from conftest import ROOT

DEFINITION = ROOT / "compose" / "apptainer" / "ronde.def"
# Of Apptainer's documentation of definition files.
SECTIONS = {"arguments", "pre", "setup", "files", "post", "test", "environment", "startscript", "runscript", "labels"}
SECTIONS |= {"help", "appinstall", "appfiles", "apprun", "applabels", "appenv", "apphelp", "apptest"}
SHELL = {"pre", "setup", "post", "test", "environment", "startscript", "runscript"}
HEADER = {"bootstrap", "from", "stage", "fingerprints", "registry", "namespace", "include", "otherurl", "osversion"}


def parsed(text: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The header and the sections. Raises ValueError for what Apptainer would refuse."""
    header: dict[str, str] = {}
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in text.splitlines():
        if found := re.fullmatch(r"%(\w+)( .*)?", line):
            if found[1] not in SECTIONS or found[1] in sections:
                raise ValueError(f"unknown or repeated section: {line}")
            lines = sections[found[1]] = []
        elif lines is not None:
            lines.append(line)
        elif line and not line.startswith("#"):
            key, colon, value = line.partition(":")
            if not colon or key.lower() not in HEADER or key.lower() in header or not value.strip():
                raise ValueError(f"no line of a header: {line}")
            header[key.lower()] = value.strip()
    if not {"bootstrap", "from"} <= set(header):
        raise ValueError("the header has no Bootstrap, or no From")
    return header, sections


def test_the_definition_has_the_form_of_one() -> None:
    header, sections = parsed(DEFINITION.read_text())
    assert header["bootstrap"] == "docker"
    assert set(sections) >= {"files", "post", "environment", "runscript", "test"}
    for name in set(sections) & SHELL:
        checked = subprocess.run(
            ["sh", "-n"], input="\n".join(sections[name]), text=True, capture_output=True, check=False
        )
        assert checked.returncode == 0, (name, checked.stderr)
    for line in filter(None, map(str.split, sections["files"])):
        source, target = line
        assert source == "dist" or (ROOT / source).exists(), source
        assert target.startswith("/")
    base = re.search(r"(?m)^ARG BASE=(.+)$", (ROOT / "compose" / "Dockerfile").read_text())
    assert base is not None
    assert header["from"] == base[1], "the images of compose/Dockerfile have the same base"


@pytest.mark.parametrize(
    "text",
    [
        "From: debian\n%post\n",
        "Bootstrap: docker\nFrom: debian\n%pots\n",
        "Bootstrap: docker\nFrom:\n",
        "no header\n%post\n",
    ],
)
def test_the_parser_refuses_mistakes(text: str) -> None:
    with pytest.raises(ValueError, match=r"header|section"):
        parsed(text)
