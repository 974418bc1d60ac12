"""Writes the metadata of an installed wheel without a build, so that PyTorch finds the project's entry points."""

from __future__ import annotations

import pathlib
import re

PACKAGE = pathlib.Path(__file__).parent.parent / "python"
PROJECT = PACKAGE.parent / "pyproject.toml"


def describe_wheel(folder: pathlib.Path) -> pathlib.Path:
    """Writes what an installed wheel would have of pyproject.toml's entry points. Returns the folder, for sys.path."""
    groups = re.findall(r'\[project\.entry-points\."([\w.]+)"\]\n((?:\w+ = .+\n)+)', PROJECT.read_text())
    assert {group for group, _ in groups} >= {"torch.backends", "torch.distributed.backends", "torchrun.handlers"}
    information = folder / "ronde-0.0.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: ronde\nVersion: 0.0.0\n")
    text = "\n".join(f"[{group}]\n{rows}" for group, rows in groups)
    (information / "entry_points.txt").write_text(text.replace('"', ""))
    return folder


def of_job(metadata: pathlib.Path, **variables: str) -> list[str]:
    """Options of `ronde run` for workers that have the wheel."""
    named = {"PYTHONPATH": f"{PACKAGE}:{metadata}", **variables}
    return [word for name, value in named.items() for word in ("-x", f"{name}={value}")]
