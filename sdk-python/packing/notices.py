"""Collects the licences of crates that are compiled into the wheel. Most require distribution of their text.

It lists the crates that the artefacts and the plugins link, for one target. Procedural macros are among them: what they
generate is compiled in. Crates with the same text share it.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import subprocess
from typing import Any

from artefacts import PLUGIN_TARGET, ROOT, all_packages

FILES = re.compile(r"(?i)(licen[sc]e|copying|notice|unlicense)([.-].*)?")


def notices(target: str) -> str:
    """Returns the whole text."""
    crates_of: dict[str, list[str]] = collections.defaultdict(list)
    for package in shipped(target):
        title = f"{package['name']} {package['version']} ({package['license']})"
        folder = pathlib.Path(package["manifest_path"]).parent
        files = sorted(path for path in folder.iterdir() if FILES.fullmatch(path.name) and path.is_file())
        text = "\n\n".join(path.read_text(errors="replace").strip() for path in files)
        crates_of[text or "The package has no file with its licence."].append(title)
    rule = "=" * 100
    parts = [f"{rule}\n" + "\n".join(titles) + f"\n{rule}\n\n{text}\n" for text, titles in crates_of.items()]
    return "What is compiled into this wheel besides ronde, and its licences.\n\n" + "\n".join(parts)


def shipped(target: str) -> list[dict[str, Any]]:
    """Returns the third-party crates that the artefacts and the plugins link, by name."""
    command = [os.environ.get("CARGO", "cargo"), "metadata", "--format-version", "1", "--locked"]
    command += ["--filter-platform", target, "--filter-platform", PLUGIN_TARGET]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    metadata = json.loads(done.stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    linked = {
        node["id"]: [dependency["pkg"] for dependency in node["deps"] if is_linked(dependency)]
        for node in metadata["resolve"]["nodes"]
    }
    waiting = [identity for identity, package in packages.items() if package["name"] in all_packages()]
    seen: set[str] = set()
    while waiting:
        identity = waiting.pop()
        if identity not in seen:
            seen.add(identity)
            waiting += linked[identity]
    # A package without a source belongs to this workspace.
    others = [packages[identity] for identity in seen if packages[identity]["source"] is not None]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def is_linked(dependency: dict[str, Any]) -> bool:
    """Returns whether a dependency is linked, so not only for tests or builds."""
    return any(kind["kind"] is None for kind in dependency["dep_kinds"])
