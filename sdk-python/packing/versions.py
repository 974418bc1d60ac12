"""Compares every version that a release carries with the workspace's, in Cargo.toml, and with the release's tag.

    python3 sdk-python/packing/versions.py [--tag v0.2.0]

The crates, the wheel and horovod-compat take their version from Cargo.toml. The chart, the images that it and the
documents name, and the recipe for conda write theirs down. The plugins have their own versions. The first job of
.github/workflows/release.yml runs this, before anything is built or published.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

from artefacts import ROOT

WORKSPACE = "Cargo.toml"
PACKAGE = re.compile(r'(?m)^version = "(?P<version>[^"]+)"')
IMAGE = re.compile(r"\bronde-(?:sidecar|prepare|worker|mpi):(?P<version>\d[\w.+-]*)")
# Files by a pattern, and what comes with a version in them.
PLACES = (
    (WORKSPACE, re.compile(r'(?m)^ronde\S* = \{ path = "[^"]+", version = "(?P<version>[^"]+)"')),
    ("tests/cargo-fuzz/Cargo.toml", PACKAGE),
    ("sdk-python/packing/conda/recipe.yaml", re.compile(r'(?m)^  version: "(?P<version>[^"]+)"')),
    ("compose/kubernetes/chart/Chart.yaml", re.compile(r"(?m)^version: (?P<version>\S+)")),
    ("compose/kubernetes/chart/Chart.yaml", re.compile(r"(?m)^appVersion: (?P<version>\S+)")),
    ("compose/kubernetes/chart/values.yaml", IMAGE),
    ("compose/kubernetes/*.yaml", IMAGE),
    ("compose/kubernetes/*.md", IMAGE),
    ("docs/KUBERNETES.md", IMAGE),
    ("docs/DEPLOYMENT.md", re.compile(r"\b(?:ronde|horovod_compat)-(?P<version>\d[^-\s]*)-(?:cp39|py3)-")),
)


def main() -> int | str:
    """Prints what is wrong. Returns the process's exit status, or a text that makes it fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="that of the release, such as v0.2.0")
    tag = parser.parse_args().tag
    if wrong := complaints(ROOT, tag):
        return "\n".join([*wrong, f"Correct these files or the tag: a release has one version, that of {WORKSPACE}."])
    print(f"{workspace(ROOT)} everywhere")
    return 0


def complaints(root: pathlib.Path, tag: str | None) -> list[str]:
    """Returns what differs from the workspace's version, one sentence each."""
    version = workspace(root)
    wrong = []
    if tag not in {None, f"v{version}"}:
        wrong.append(f"The tag is {tag}, but the version in {WORKSPACE} is {version}.")
    for pattern, expression in PLACES:
        found = [each for path in sorted(root.glob(pattern)) for each in versions(root, path, expression)]
        if not found:
            wrong.append(f"{pattern} has no version that {expression.pattern} matches.")
        wrong += [f"{place} has {other}, not {version}." for place, other in found if other != version]
    return wrong


def workspace(root: pathlib.Path) -> str:
    """Returns the version of the workspace."""
    found = PACKAGE.search((root / WORKSPACE).read_text())
    if found is None:
        sys.exit(f"{WORKSPACE} has no version")
    return found["version"]


def versions(root: pathlib.Path, path: pathlib.Path, expression: re.Pattern[str]) -> list[tuple[str, str]]:
    """Returns the versions in a file, each with its place as FILE:LINE."""
    text = path.read_text()
    return [
        (f"{path.relative_to(root)}:{text.count(chr(10), 0, match.start('version')) + 1}", match["version"])
        for match in expression.finditer(text)
    ]


if __name__ == "__main__":
    sys.exit(main())
