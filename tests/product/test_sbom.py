"""The list of components (SBOM) is valid CycloneDX, and has what is in the wheel.

That is crates of Cargo.lock, and Python packages of the wheel's metadata. The artefacts themselves name the crates
whose code they contain.
"""

from __future__ import annotations

import copy
import email
import functools
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import zipfile
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / "sdk-python" / "packing" / "sbom.py"
sys.path.insert(0, str(SCRIPT.parent))
SBOM = runpy.run_path(str(SCRIPT))
TARGET = f"{os.uname().machine}-unknown-linux-gnu"
# Where the paths in panics of a crate begin: `/registry/src/INDEX/NAME-VERSION/`.
SOURCE = re.compile(rb"/registry/src/[a-z0-9.-]+/([A-Za-z0-9_-]+?)-(\d+\.\d+\.\d+[A-Za-z0-9.+-]*)/")
# The first bytes of compiled files: of programs and libraries, and of modules in WebAssembly.
COMPILED = (b"\x7fELF", b"\0asm")

Crate = tuple[str, str]

VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_5).validate_str(sys.stdin.read())
sys.exit(None if error is None else f"{error!r}")
"""


@pytest.fixture(scope="module")
def listed() -> dict[str, Any]:
    """The list."""
    found: dict[str, Any] = SBOM["document"](TARGET)
    return found


@pytest.fixture(scope="module")
def validator() -> str:
    """A Python that has CycloneDX's schemas."""
    environment = str(ROOT / "tests" / "setup" / "environment.py")
    subprocess.run([sys.executable, environment, "sbom"], check=True)
    path = subprocess.run([sys.executable, environment, "path", "sbom"], check=True, capture_output=True, text=True)
    return path.stdout.strip()


def crates(listed: dict[str, Any], *scopes: str) -> set[Crate]:
    """The crates in the list."""
    components = [each for each in listed["components"] if each["purl"].startswith("pkg:cargo/")]
    return {(each["name"], each["version"]) for each in components if each["scope"] in scopes}


def complaints(listed: dict[str, Any]) -> list[str]:
    """What contradicts Cargo.lock, or itself."""
    checksums = SBOM["locked"]()
    found = []
    references = [each["bom-ref"] for each in [listed["metadata"]["component"], *listed["components"]]]
    found += [f"{name} is there twice" for name in set(references) if references.count(name) > 1]
    graph = {each["ref"]: each["dependsOn"] for each in listed["dependencies"]}
    named = set(graph) | {name for names in graph.values() for name in names}
    found += [f"{name} is in the graph or the list only" for name in named ^ set(references)]
    for each in listed["components"]:
        if not each["purl"].startswith("pkg:cargo/"):
            continue
        expected = checksums.get((each["name"], each["version"]))
        hashes = [entry["content"] for entry in each.get("hashes", [])]
        if hashes != ([expected] if expected else []):
            found.append(f"{each['purl']} has the checksum {hashes}, and {expected} in Cargo.lock")
        if expected is None and not each["name"].startswith("ronde"):
            found.append(f"{each['purl']} is not in Cargo.lock")
        if not each.get("licenses"):
            found.append(f"{each['purl']} has no licence")
    return found


def test_the_list_is_valid(listed: dict[str, Any], validator: str) -> None:
    def outcome(document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        command = [validator, "-c", VALIDATE]
        return subprocess.run(command, input=json.dumps(document), capture_output=True, text=True, check=False)

    done = outcome(listed)
    assert done.returncode == 0, done.stderr
    wrong = copy.deepcopy(listed)
    wrong["components"][0]["scope"] = "perhaps"
    assert "perhaps" in outcome(wrong).stderr


def test_the_list_agrees_with_cargo_lock(listed: dict[str, Any]) -> None:
    assert complaints(listed) == []
    wrong = copy.deepcopy(listed)
    removed = next(each for each in wrong["components"] if each["name"] == "rustls")
    wrong["components"].remove(removed)
    assert complaints(wrong) == [f"{removed['purl']} is in the graph or the list only"]
    wrong = copy.deepcopy(listed)
    next(each for each in wrong["components"] if each["name"] == "rustls")["hashes"][0]["content"] = "0" * 64
    assert len(complaints(wrong)) == 1


def graph(*kinds: str | None) -> dict[Crate, set[Crate]]:
    """What the crates of the whole workspace depend on, over these kinds of edges; None is that of normal ones.

    Other members may switch on features that the wheel lacks, so it has more edges than the list.
    """
    metadata = cargo_metadata()
    crate_of = {package["id"]: (package["name"], package["version"]) for package in metadata["packages"]}
    return {
        crate_of[node["id"]]: {
            crate_of[each["pkg"]] for each in node["deps"] if any(kind["kind"] in kinds for kind in each["dep_kinds"])
        }
        for node in metadata["resolve"]["nodes"]
    }


@functools.cache
def cargo_metadata() -> dict[str, Any]:
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    )
    return found


def reachable(edges: dict[Crate, set[Crate]], without: frozenset[Crate] = frozenset()) -> set[Crate]:
    """What the wheel's packages depend on, and what that depends on."""
    found, waiting = set(), [crate for crate in edges if crate[0] in SBOM["all_packages"]()]
    while waiting:
        crate = waiting.pop()
        if crate not in found and crate not in without:
            found.add(crate)
            waiting += edges[crate]
    return found


def test_no_crate_is_missing(listed: dict[str, Any]) -> None:
    """The list comes from the trees that cargo prints; this walks the graph of its metadata, and Cargo.lock."""
    found, edges = crates(listed, "required", "excluded"), graph(None, "build")
    assert found <= reachable(edges), found - reachable(edges)
    direct = {other for crate in found if crate[0].startswith("ronde") for other in edges[crate]}
    assert direct <= found, direct - found


def test_what_runs_in_the_compiler_is_not_listed_as_required(listed: dict[str, Any]) -> None:
    """Procedural macros, and what only these use, are in no artefact."""
    packages = cargo_metadata()["packages"]
    macros = frozenset(
        (package["name"], package["version"])
        for package in packages
        if any("proc-macro" in target["kind"] for target in package["targets"])
    )
    required, linked = crates(listed, "required"), reachable(graph(None), without=macros)
    assert required <= linked, required - linked
    assert {"serde_derive", "syn", "tokio-macros"} <= {name for name, _ in crates(listed, "excluded")}


# What an artefact certainly contains: otherwise nothing would be found in it.
@pytest.mark.parametrize(
    ("artefact", "known"), [("ronde", "tokio"), ("lib_ronde.so", "tokio"), ("libnccl_net_ronde.so", "libc")]
)
def test_the_artefacts_contain_no_other_crate(listed: dict[str, Any], artefact: str, known: str) -> None:
    binary = os.environ.get("RONDE_BIN")
    if not binary:
        pytest.skip("RONDE_BIN is not set; run the tests by `make test-python`")
    content = pathlib.Path(binary).with_name(artefact).read_bytes()
    found = {(name.decode(), version.decode()) for name, version in SOURCE.findall(content)}
    assert known in {name for name, _ in found}
    linked = crates(listed, "required")
    assert found <= linked, found - linked


def crate_of(path: str) -> str:
    """The crate that makes a compiled file of the wheel."""
    name = pathlib.PurePath(path)
    if name.suffix == ".wasm":
        return f"ronde-plugin-{name.stem}"
    return {"_ronde.abi3.so": "ronde-python", "ronde": "ronde-sidecar", "libnccl-net-ronde.so": "ronde-nccl-net"}[
        name.name
    ]


def test_the_list_has_every_compiled_file_of_the_wheel(listed: dict[str, Any], wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if archive.open(name).read(4).startswith(COMPILED)]
    expected = {crate_of(name) for name in compiled}
    assert len(expected) == len(compiled) > 3, compiled
    (top,) = [each for each in listed["dependencies"] if each["ref"] == listed["metadata"]["component"]["bom-ref"]]
    listed_there = {each["name"] for each in listed["components"] if each["bom-ref"] in top["dependsOn"]}
    assert expected <= listed_there, expected - listed_there
    assert expected <= {name for name, _ in crates(listed, "required")}


def test_the_list_has_what_the_wheels_metadata_requires(listed: dict[str, Any], wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        head = email.message_from_bytes(archive.read(metadata))
        folder = metadata.rpartition("/")[0]
        packed = json.loads(archive.read(f"{folder}/sboms/ronde.cdx.json"))
    assert packed == listed, "the wheel has another list"
    root = listed["metadata"]["component"]
    assert (root["name"], root["version"]) == (head["Name"], head["Version"])
    assert root["licenses"] == [{"expression": head["License-Expression"]}]
    required: set[str] = set()
    optional: set[str] = set()
    for requirement in head.get_all("Requires-Dist", []):
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert match, requirement
        (optional if "extra ==" in requirement else required).add(re.sub(r"[-_.]+", "-", match[0]).lower())
    assert required, "the wheel requires NumPy"
    python = [each for each in listed["components"] if each["purl"].startswith("pkg:pypi/")]
    assert {each["name"] for each in python if each["scope"] == "required"} == required
    assert {each["name"] for each in python if each["scope"] == "optional"} == optional - required


def test_equal_inputs_give_equal_bytes() -> None:
    """Also where sets have another order: each process of Python draws one, unless a variable names it."""
    texts = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, str(SCRIPT), "--target", TARGET]
        texts.append(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
    assert texts[0]
    assert texts[0] == texts[1]
