"""What `make newcomer-test` runs, and in which systems. The recipe itself takes 25 minutes and needs root."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import newcomer
import pytest
from blocks import Block, of_section

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DEBIAN = ROOT / "tests" / "setup" / "debian.sh"
KEYS = {"debian-archive-keyring": "debian", "ubuntu-keyring": "ubuntu"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """No variable of the recipe, and a debootstrap that knows a release of each distribution."""
    for name in ("SUITE", "MIRROR", "RUSTUP", "WHEEL"):
        monkeypatch.delenv(f"RONDE_NEWCOMER_{name}", raising=False)
    scripts, keyrings = tmp_path / "scripts", tmp_path / "keyrings"
    for folder in (scripts, keyrings):
        folder.mkdir()
    for suite, owner in (("bookworm", "debian"), ("noble", "ubuntu")):
        (scripts / suite).write_text(f"keyring /usr/share/keyrings/{owner}-archive-keyring.gpg\n")
        (keyrings / f"{owner}-archive-keyring.gpg").touch()
    monkeypatch.setattr(newcomer, "SCRIPTS", scripts)
    monkeypatch.setattr(newcomer, "KEYRINGS", keyrings)


def build_blocks() -> list[Block]:
    """The blocks of the section that are run."""
    return [block for block in of_section(newcomer.README, newcomer.BUILD) if newcomer.is_meant(block)]


def test_the_page_has_every_command_of_a_build() -> None:
    assert {"ca-certificates", "curl"} <= set(newcomer.listed_packages(newcomer.BUILD))
    (rust,) = [block for block in of_section(newcomer.README, newcomer.BUILD) if "sh.rustup.rs" in block.text]
    assert "--target wasm32-unknown-unknown" in rust.text


def test_the_block_that_installs_rust_is_run_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (clone,) = build_blocks()
    assert "git clone" in clone.text
    monkeypatch.setenv("RONDE_NEWCOMER_RUSTUP", "1")
    rust, clone = build_blocks()
    assert "sh.rustup.rs" in rust.text
    assert "git clone" in clone.text


@pytest.mark.parametrize(
    ("suite", "mirror", "components"),
    [("bookworm", [], "main"), ("noble", [], "main,universe"), ("noble", ["http://mirror.invalid/u"], "main,universe")],
)
def test_a_system_is_of_the_release_that_is_named(
    suite: str, mirror: list[str], components: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RONDE_NEWCOMER_SUITE", suite)
    if mirror:
        monkeypatch.setenv("RONDE_NEWCOMER_MIRROR", mirror[0])
    options = ["--variant=minbase", f"--components={components}", "--include=curl,gcc"]
    expected = ["debootstrap", *options, suite, "/system", *mirror]
    assert newcomer.debootstrap(pathlib.Path("/system"), ["curl", "gcc"]) == expected


def test_a_release_that_cannot_be_made_is_refused(tmp_path: pathlib.Path) -> None:
    assert newcomer.unfit_for("bookworm") is None
    assert newcomer.unfit_for("noble") is None
    assert "knows no release 'nobel'" in str(newcomer.unfit_for("nobel"))
    (tmp_path / "keyrings" / "ubuntu-archive-keyring.gpg").unlink()
    assert "ubuntu-archive-keyring.gpg" in str(newcomer.unfit_for("noble"))
    assert "apt-get install ubuntu-keyring" in str(newcomer.unfit_for("noble"))
    (tmp_path / "keyrings" / "debian-archive-keyring.gpg").unlink()
    assert "apt-get install debian-archive-keyring" in str(newcomer.unfit_for("bookworm"))


@pytest.mark.parametrize("candidate", ["2023.11.28.1", "(none)"])
def test_the_setup_installs_the_keys_of_both_distributions_that_apt_has(
    candidate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Without root it names them."""
    programs = {"id": "echo 1000", "apt-cache": f'echo "$2:\n  Installed: (none)\n  Candidate: {candidate}"'}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run([str(DEBIAN), "newcomer"], capture_output=True, text=True, timeout=60, check=True)
    named = set(done.stderr.split())
    for package, distribution in KEYS.items():
        is_absent = not pathlib.Path(f"/usr/share/keyrings/{distribution}-archive-keyring.gpg").exists()
        assert (package in named) == (is_absent and candidate != "(none)"), done.stderr


def test_the_recipe_runs_in_ci_or_is_reported_as_left_out() -> None:
    (left_out,) = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("left_out=(")]
    assert "newcomer-test" in left_out
    workflow = (ROOT / ".github" / "workflows" / "newcomer.yml").read_text()
    assert "make newcomer-test" in workflow
    for part in ("suite: bookworm", "suite: noble", 'RONDE_NEWCOMER_RUSTUP: "1"'):
        assert part in workflow, part


def test_a_pull_request_runs_the_recipe_if_it_changes_the_pages_or_the_recipe() -> None:
    """Others do not: it takes two jobs of up to 90 minutes."""
    workflow = (ROOT / ".github" / "workflows" / "newcomer.yml").read_text()
    found = re.search(r"(?m)^  pull_request:\n    paths:\n((?: {6}- .+\n)+)", workflow)
    assert found is not None
    paths = re.findall(r"- (.+)", found[1])
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    own = pathlib.Path(newcomer.__file__)
    imported = re.findall(r"(?m)^from (\w+) import", own.read_text())
    modules = [own, *(path for name in imported if (path := own.with_name(f"{name}.py")).exists())]
    assert len(modules) == 4
    needed = [newcomer.README, newcomer.QUICKSTART, *modules, DEBIAN]
    assert {str(path.relative_to(ROOT)) for path in needed} <= set(paths)
