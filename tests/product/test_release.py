"""What a release checks before it publishes, and what is kept current: versions, the order of jobs, dependencies."""

from __future__ import annotations

import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKING = ROOT / "sdk-python" / "packing"
# The modules beside the script.
sys.path.insert(0, str(PACKING))
VERSIONS = runpy.run_path(str(PACKING / "versions.py"))
WORKFLOWS = ROOT / ".github" / "workflows"
DEPENDABOT = ROOT / ".github" / "dependabot.yml"
# The jobs that hand something out.
PUBLISHING = {"attest", "crates", "docs", "images", "pypi"}


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with the files that have a version."""
    patterns = {pattern for pattern, _ in VERSIONS["PLACES"]}
    for path in {path for pattern in patterns for path in ROOT.glob(pattern)}:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


def test_everything_has_the_workspaces_version(checkout: pathlib.Path) -> None:
    assert VERSIONS["complaints"](ROOT, None) == []
    version = VERSIONS["workspace"](ROOT)
    assert VERSIONS["complaints"](checkout, f"v{version}") == []


@pytest.mark.parametrize("tag", ["v9.9.9", "9.9.9", ""])
def test_a_tag_of_another_version_is_refused(tag: str) -> None:
    version = VERSIONS["workspace"](ROOT)
    assert VERSIONS["complaints"](ROOT, tag) == [f"The tag is {tag}, but the version in Cargo.toml is {version}."]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("Cargo.toml", 'path = "proto/wire", version = "{}"'),
        ("tests/cargo-fuzz/Cargo.toml", '\nversion = "{}"'),
        ("sdk-python/packing/conda/recipe.yaml", '\n  version: "{}"'),
        ("compose/kubernetes/chart/Chart.yaml", "\nversion: {}"),
        ("compose/kubernetes/chart/Chart.yaml", "\nappVersion: {}"),
        ("compose/kubernetes/chart/values.yaml", "ronde-mpi:{}"),
        ("compose/kubernetes/jobset.yaml", "ronde-prepare:{}"),
        ("compose/kubernetes/README.md", "ronde-worker:{}"),
        ("docs/KUBERNETES.md", "ronde-sidecar:{}"),
        ("docs/DEPLOYMENT.md", "horovod_compat-{}-py3"),
    ],
)
def test_each_place_with_another_version_is_found(checkout: pathlib.Path, file: str, text: str) -> None:
    version, path = VERSIONS["workspace"](ROOT), checkout / file
    before, found, after = path.read_text().partition(text.format(version))
    assert found, f"{file} has no {text}"
    path.write_text(f"{before}{text.format('9.9.9')}{after}")
    line = (before + found).count("\n") + 1
    assert VERSIONS["complaints"](checkout, None) == [f"{file}:{line} has 9.9.9, not {version}."]


def test_a_place_that_lost_its_version_is_found(checkout: pathlib.Path) -> None:
    """Else a rewritten file would go unchecked."""
    (checkout / "tests" / "cargo-fuzz" / "Cargo.toml").write_text("[package]\n")
    (complaint,) = VERSIONS["complaints"](checkout, None)
    assert complaint.startswith("tests/cargo-fuzz/Cargo.toml has no version that ")


def test_wheels_and_crates_take_the_workspaces_version() -> None:
    """So these need no comparison."""
    assert 'path = "../Cargo.toml"' in (ROOT / "sdk-python" / "pyproject.toml").read_text()
    assert runpy.run_path(str(ROOT / "sdk-python/horovod-compat/backend.py"))["version"]() == VERSIONS["workspace"](
        ROOT
    )
    for path in [ROOT / name / "Cargo.toml" for name in members()]:
        text = path.read_text()
        assert re.search(r"(?m)^(version\.workspace = true|publish = false)$", text), path


def members() -> list[str]:
    """The folders of the workspace's crates."""
    listed = re.search(r"(?ms)^members = \[(.*?)^\]", (ROOT / "Cargo.toml").read_text())
    assert listed
    return re.findall(r'"(.+)"', listed[1])


def jobs(workflow: str) -> dict[str, str]:
    """The text of each job of a workflow."""
    _, _, text = (WORKFLOWS / workflow).read_text().partition("\njobs:\n")
    parts = re.split(r"(?m)^  ([a-z]+):\n", text)
    return dict(zip(parts[1::2], parts[2::2]))


def needed(job: str) -> set[str]:
    """The jobs of a release that have to pass before this one starts."""
    listed = re.search(r"(?m)^    needs: \[?(.+?)\]?$", jobs("release.yml")[job])
    direct = set(listed[1].split(", ")) if listed else set()
    return direct.union(*(needed(name) for name in direct))


def test_nothing_is_published_before_versions_are_compared_and_ci_passes() -> None:
    release = jobs("release.yml")
    assert set(release) == {"version", "test", "components", "chart"} | PUBLISHING
    assert needed("version") == set()
    assert all("version" in needed(name) for name in release if name != "version")
    assert all("test" in needed(name) for name in PUBLISHING)
    assert "    uses: ./.github/workflows/ci.yml\n" in release["test"]
    called = {name for text in release.values() for name in re.findall(r"uses: \./\.github/workflows/(\S+)", text)}
    assert called == {"ci.yml", "docs.yml"}
    for name in called:
        assert "\n  workflow_call:\n" in (WORKFLOWS / name).read_text()
    # Nothing else starts at a tag, and so publishes without these jobs.
    assert [path.name for path in WORKFLOWS.glob("*.yml") if "    tags:" in path.read_text()] == ["release.yml"]


@pytest.mark.parametrize(("tag", "status"), [("v{}", 0), ("v9.{}", 1)])
def test_the_first_job_compares_the_tag(tag: str, status: int) -> None:
    """Runs its step as the workflow does."""
    step = textwrap.dedent(jobs("release.yml")["version"].partition("run: |\n")[2])
    environment = {"PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"}
    environment["TAG"] = tag.format(VERSIONS["workspace"](ROOT))
    command = ["bash", "-e", "-c", step]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == status, done.stderr
    assert ("The tag is v9." in done.stderr) == bool(status)


def test_a_release_uploads_each_artefact_once() -> None:
    """Jobs of called workflows share the run, in which a second one of a name is an error."""
    texts = [(WORKFLOWS / name).read_text() for name in ("release.yml", "ci.yml", "wheels.yml")]
    names = [name for text in texts for name in re.findall(r"upload-artifact@\S+\n +with:\n +name: (\S+)", text)]
    assert sorted(names) == ["chart", "components", "wheels"]
    assert sum(text.count("uses: ./.github/workflows/wheels.yml") for text in texts) == 1


def test_images_have_lists_of_their_components() -> None:
    images = jobs("release.yml")["images"]
    assert "--sbom=true --provenance=mode=max" in images
    assert "sbom-path: components/ronde-x86_64-unknown-linux-gnu.cdx.json" in images


def updated() -> set[tuple[str, str]]:
    """What dependabot updates: a kind of packages, and a folder."""
    entries = re.findall(r"(?m)^  - package-ecosystem: (\S+)\n    directory: /(\S*)$", DEPENDABOT.read_text())
    return {(kind, folder) for kind, folder in entries}


def test_every_lock_file_and_the_images_are_kept_current() -> None:
    found = {path.relative_to(ROOT).parent for depth in ("", "*/", "*/*/") for path in ROOT.glob(f"{depth}Cargo.lock")}
    # Folders that git ignores have packages of their own.
    locks = {str(folder) for folder in found if not {"target", "dist"}.intersection(folder.parts)}
    assert locks >= {".", "tests/cargo-fuzz"}
    assert {("cargo", "" if folder == "." else folder) for folder in locks} <= updated()
    assert {("docker", "compose"), ("pip", "tests/setup"), ("github-actions", "")} <= updated()


def test_dependabot_reads_the_images_that_are_built_from() -> None:
    named = re.findall(r"(?m)^FROM (\S+) AS", (ROOT / "compose" / "base-images.Dockerfile").read_text())
    defaults = dict(re.findall(r"(?m)^ARG (BASE|BUILDER)=(\S+)$", (ROOT / "compose" / "Dockerfile").read_text()))
    assert named == [defaults["BASE"], defaults["BUILDER"]]
