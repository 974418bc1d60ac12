"""What `make wheel-test` compares two builds of the wheel with, and what makes them equal. It compiles one line."""

from __future__ import annotations

import pathlib
import runpy
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
PACKING = ROOT / "sdk-python" / "packing"
# The modules beside the scripts.
sys.path.insert(0, str(PACKING))
REPRODUCE = runpy.run_path(str(PACKING / "reproduce.py"))
REMAP = runpy.run_path(str(PACKING / "remap.py"))
NAME = "ronde-0.2.0-cp39-abi3-manylinux_2_28_x86_64.whl"


def packed(folder: pathlib.Path, content: dict[str, bytes]) -> pathlib.Path:
    """A wheel with these files."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return folder


def test_equal_wheels_have_no_differences(tmp_path: pathlib.Path) -> None:
    first, second = (packed(tmp_path / name, {"a": b"1", "b": b"2"}) for name in ("first", "second"))
    assert REPRODUCE["differences"](first, second) == []


@pytest.mark.parametrize(
    ("content", "difference"),
    [
        ({"a": b"1", "b": b"3"}, f"{NAME}: b differs"),
        ({"a": b"1"}, f"{NAME}: b differs"),
        ({"a": b"1", "b": b"2", "c": b""}, f"{NAME}: c differs"),
        ({"b": b"2", "a": b"1"}, f"{NAME}: the files are the same, but packed differently (order, times, modes)"),
    ],
)
def test_files_that_differ_are_named(content: dict[str, bytes], difference: str, tmp_path: pathlib.Path) -> None:
    first, second = packed(tmp_path / "first", {"a": b"1", "b": b"2"}), packed(tmp_path / "second", content)
    assert REPRODUCE["differences"](first, second) == [difference]


def test_wheels_that_are_missing_are_no_equal_wheels(tmp_path: pathlib.Path) -> None:
    full, empty = packed(tmp_path / "full", {}), tmp_path / "empty"
    empty.mkdir()
    assert REPRODUCE["differences"](full, empty) == [f"there is no {empty / NAME}"]
    assert REPRODUCE["differences"](empty, empty) == [f"there is no wheel in {empty} and {empty}"]


def test_a_file_that_names_a_folder_of_the_machine_is_found(tmp_path: pathlib.Path) -> None:
    folder = packed(tmp_path / "one", {"ronde": b"\0/home/me/.cargo/registry/src/x.rs\0", "other": b"/cargo/x.rs"})
    named = REPRODUCE["named"](folder / NAME, [pathlib.Path("/home/me/.cargo"), pathlib.Path("/tmp/ronde-1")])
    assert named == [f"{folder / NAME}: ronde has '/home/me/.cargo/registry/src/x.rs'"]


def test_a_copy_has_what_git_does_not_ignore_as_it_is_now(tmp_path: pathlib.Path) -> None:
    checkout, copy = tmp_path / "checkout", tmp_path / "copy"
    (checkout / "below").mkdir(parents=True)

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=checkout, check=True, capture_output=True)

    for name, text in {".gitignore": "*.so\n", "kept": "old", "deleted": "", "below/script": "#!/bin/sh\n"}.items():
        (checkout / name).write_text(text)
    (checkout / "below" / "script").chmod(0o755)
    git("init", "--quiet")
    git("add", ".")
    (checkout / "kept").write_text("new")
    (checkout / "deleted").unlink()
    (checkout / "added").write_text("")
    (checkout / "built.so").write_text("")
    (checkout / "link").symlink_to("kept")
    REPRODUCE["copy"](checkout, copy)
    found = {str(path.relative_to(copy)) for path in copy.rglob("*") if not path.is_dir()}
    assert found == {".gitignore", "kept", "below/script", "added", "link"}
    assert (copy / "kept").read_text() == "new"
    assert (copy / "link").is_symlink()
    assert (copy / "below" / "script").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"RUSTFLAGS": "-C target-cpu=v3"}, ["-C", "target-cpu=v3"]),
        ({"RUSTFLAGS": "-g", "CARGO_ENCODED_RUSTFLAGS": '--cfg\x1ffeature="a b"'}, ["--cfg", 'feature="a b"']),
    ],
)
def test_flags_of_the_environment_stay(
    variables: dict[str, str], expected: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUSTFLAGS", raising=False)
    monkeypatch.delenv("CARGO_ENCODED_RUSTFLAGS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (passed,) = REMAP["environment"](tmp_path).values()
    assert passed.split("\x1f") == [*expected, *REMAP["flags"](tmp_path)]


def test_what_rustc_compiles_names_no_folder_of_the_machine(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the two folders of a machine that cargo compiles sources from by their whole path; each has other lengths."""
    outputs = []
    for name in ("a", "another"):
        home, target = tmp_path / name / "home", tmp_path / name / "target"
        monkeypatch.setenv("CARGO_HOME", str(home))
        texts = []
        for source in (home / "registry" / "src" / "crate" / "lib.rs", target / "release" / "out" / "generated.rs"):
            source.parent.mkdir(parents=True)
            source.write_text("#[inline(never)]\npub fn first(of: &[u8]) -> u8 { of[0] }\n")
            output = source.with_suffix(".s")
            options = ["--crate-type=lib", "--crate-name=one", "--emit=asm", "-Copt-level=1"]
            rustc([*REMAP["flags"](target), *options, "-o", str(output), str(source)])
            texts.append(output.read_text())
        assert "/cargo/registry/src/crate/lib.rs" in texts[0]
        assert "/target/release/out/generated.rs" in texts[1]
        assert not any(str(tmp_path) in text for text in texts)
        outputs.append(texts)
    assert outputs[0] == outputs[1]


def rustc(arguments: list[str]) -> None:
    """Runs the compiler."""
    done = subprocess.run(["rustc", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
