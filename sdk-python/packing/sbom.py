"""Lists the components of the wheel (SBOM) in CycloneDX: crates in its artefacts, and packages that it requires.

    python3 sdk-python/packing/sbom.py [--target x86_64-unknown-linux-gnu] > ronde-sbom.json

Crates are those that cargo selects for the three artefacts and one target, and for the plugins, with the checksums of
Cargo.lock. Procedural macros, and what only these and build scripts use, have the scope `excluded`: they run where the
wheel is made, and are not in it. Equal inputs give equal bytes, so that the wheel stays reproducible; therefore the
list has no time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from typing import Any

from artefacts import PACKAGES, PLUGIN_TARGET, ROOT, all_packages, options, plugin_packages

SPEC_VERSION = "1.5"
# `3serde v1.0.229 (proc-macro) (*)`: the depth, the name, the version, and marks.
LINE = re.compile(r"(?P<depth>\d+)(?P<name>[A-Za-z0-9_-]+) v(?P<version>\S+).*")
LOCKED = re.compile(
    r'\[\[package\]\]\nname = "(?P<name>.+)"\nversion = "(?P<version>.+)"\n'
    r'(source = "(?P<source>.+)"\n)?(checksum = "(?P<checksum>.+)"\n)?'
)
REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")

Crate = tuple[str, str]


def main() -> int:
    """Prints the list. Returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=f"{os.uname().machine}-unknown-linux-gnu", help="as rustc names it")
    sys.stdout.write(text(parser.parse_args().target))
    return 0


def text(target: str) -> str:
    """Returns the list for one target."""
    return json.dumps(document(target), indent=1) + "\n"


def document(target: str) -> dict[str, Any]:
    """Returns the list as an object."""
    linked, edges = crates(target, "normal,no-proc-macro"), crates(target, "normal,build")
    known, checksums = packages(), locked()
    root = wheel(known[next(crate for crate in edges if crate[0] == PACKAGES[0])])
    needed = requirements()
    components = [component(known[crate], checksums.get(crate), crate in linked) for crate in sorted(edges)]
    tops = sorted(ref(crate) for crate in edges if crate[0] in all_packages())
    graph = {root["bom-ref"]: sorted([*tops, *(each["bom-ref"] for each in needed if each["scope"] == "required")])}
    graph |= {ref(crate): sorted(ref(other) for other in others) for crate, others in sorted(edges.items())}
    graph |= {each["bom-ref"]: [] for each in needed}
    content: dict[str, Any] = {
        "metadata": {"component": root, "properties": [{"name": "ronde:target", "value": target}]},
        "components": [*components, *needed],
        "dependencies": [{"ref": name, "dependsOn": others} for name, others in graph.items()],
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
    number = uuid.UUID(bytes=digest[:16], version=5)
    head = {"bomFormat": "CycloneDX", "specVersion": SPEC_VERSION, "serialNumber": f"urn:uuid:{number}", "version": 1}
    return {**head, **content}


def crates(target: str, kinds: str) -> dict[Crate, set[Crate]]:
    """Returns the crates that cargo selects for the wheel, over these kinds of edges, and what each depends on."""
    found: dict[Crate, set[Crate]] = {}
    for of, chosen in ((target, PACKAGES), (PLUGIN_TARGET, plugin_packages())):
        command = ["tree", "--locked", "--target", of, "--edges", kinds, "--prefix", "depth", "--format", "{p}"]
        add_tree(found, cargo(*command, *options(chosen)))
    return found


def add_tree(found: dict[Crate, set[Crate]], tree: str) -> None:
    """Adds the crates of a tree, as cargo prints it, and what each depends on."""
    above: list[Crate] = []
    for line in tree.splitlines():
        if not (match := LINE.fullmatch(line)):
            continue
        depth, crate = int(match["depth"]), (match["name"], match["version"])
        del above[depth:]
        found.setdefault(crate, set())
        if above:
            found[above[-1]].add(crate)
        above.append(crate)


def packages() -> dict[Crate, dict[str, Any]]:
    """Returns what cargo knows of each crate of the workspace."""
    metadata = json.loads(cargo("metadata", "--format-version", "1", "--locked"))
    return {(package["name"], package["version"]): package for package in metadata["packages"]}


def locked() -> dict[Crate, str]:
    """Returns the checksums of Cargo.lock; crates of this checkout have none."""
    matches = LOCKED.finditer((ROOT / "Cargo.lock").read_text())
    return {(match["name"], match["version"]): match["checksum"] for match in matches if match["checksum"]}


def component(package: dict[str, Any], checksum: str | None, is_linked: bool) -> dict[str, Any]:
    """Returns the entry of a crate."""
    crate = (package["name"], package["version"])
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": ref(crate),
        "name": crate[0],
        "version": crate[1],
        "scope": "required" if is_linked else "excluded",
        "purl": ref(crate),
    }
    if package["license"]:
        # Older crates write a slash for a choice.
        entry["licenses"] = [{"expression": re.sub(r"\s*/\s*", " OR ", package["license"])}]
    if checksum:
        entry["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        entry["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return entry


def wheel(package: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of the wheel, whose version is that of the crates."""
    name, version = "ronde", package["version"]
    return {
        "type": "application",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"expression": package["license"]}],
    }


def requirements() -> list[dict[str, Any]]:
    """Returns the Python packages that the wheel and its extras require, without versions: pip chooses them."""
    project = (ROOT / "sdk-python" / "pyproject.toml").read_text()
    always = set(names(re.search(r"(?m)^dependencies = (\[.*\])$", project)))
    extras = project.split("[project.optional-dependencies]", 1)[1].split("\n[", 1)[0]
    optional = {name for line in re.finditer(r"(?m)^[a-z-]+ = (\[.*\])$", extras) for name in names(line)} - always
    entry = {"type": "library"}
    return [
        {
            **entry,
            "bom-ref": f"pkg:pypi/{name}",
            "name": name,
            "scope": "required" if name in always else "optional",
            "purl": f"pkg:pypi/{name}",
        }
        for name in sorted(always | optional)
    ]


def names(found: re.Match[str] | None) -> list[str]:
    """Returns the normalized names of a list of requirements, which is also one of JSON."""
    if found is None:
        sys.exit("pyproject.toml has no list of dependencies in one line")
    matches = (REQUIREMENT.match(each) for each in json.loads(found[1]))
    return [re.sub(r"[-_.]+", "-", match[0]).lower() for match in matches if match]


def ref(crate: Crate) -> str:
    """Returns the package URL of a crate, by which the list refers to it."""
    return f"pkg:cargo/{crate[0]}@{crate[1]}"


def cargo(*arguments: str) -> str:
    """Returns what cargo prints."""
    command = [os.environ.get("CARGO", "cargo"), *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
