"""Makes the wheels twice, from two copies of this checkout in different folders, and compares them byte by byte.

    python sdk-python/packing/reproduce.py [--target x86_64-unknown-linux-gnu] [--out dist/reproduced]

Each time everything is compiled, into an empty target folder below TMPDIR, so this takes the time of two release builds
and some gigabytes. It runs in the environment that packs (`make wheel-test`). The compilers, cargo's folder with its
downloaded crates, and zig's cache of the C library are this machine's both times. Both copies have the files that git
does not ignore, and no commit: the program's `ronde version` shows none. No file of a wheel may name a folder that it
was made in, or cargo's.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from artefacts import ROOT
from remap import cargo_home

# The beginnings of the names of the two builds' folders. They differ in length.
PREFIXES = ("ronde-", "ronde-in-a-folder-with-a-longer-name-")


def main() -> int | str:
    """Makes and compares the wheels. Returns the process's exit status, or a text that makes it fail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="x86_64-unknown-linux-gnu", help="as rustc names it")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "dist" / "reproduced", help="the folder for the wheels"
    )
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    wrong: list[str] = []
    made = []
    for number, prefix in enumerate(PREFIXES, 1):
        out = arguments.out.absolute() / str(number)
        out.mkdir(parents=True)
        wrong += build(prefix, arguments.target, out)
        made.append(out)
    wrong += differences(*made)
    if wrong:
        return "\n".join([f"the wheels in {arguments.out} are not reproducible:", *wrong])
    print(f"two builds made the same {', '.join(sorted(path.name for path in made[0].iterdir()))}")
    return 0


def build(prefix: str, target: str, out: pathlib.Path) -> list[str]:
    """Makes the wheels in a temporary folder with this prefix. Returns where they name it, one sentence each."""
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        sources, compiled = pathlib.Path(name, "sources"), pathlib.Path(name, "target")
        copy(ROOT, sources)
        # A wrapper that caches what rustc makes would return the first build's output to the second.
        # Variables on the command line of make would take the place of this target folder.
        variables = {"CARGO_TARGET_DIR": str(compiled), "RUSTC_WRAPPER": "", "PYO3_NO_PYTHON": "1", "MAKEFLAGS": ""}
        command = [sys.executable, str(sources / "sdk-python" / "packing" / "wheel.py")]
        command += ["--target", target, "--out", str(out)]
        subprocess.run(command, cwd=sources, env={**os.environ, **variables}, check=True)
        folders = [pathlib.Path(name), cargo_home()]
        return [text for path in sorted(out.glob("*.whl")) for text in named(path, folders)]


def copy(checkout: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the files of a checkout that git does not ignore, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = checkout / name, folder / name
        # A file that was deleted, but not yet committed so, is listed as well.
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def named(wheel: pathlib.Path, folders: list[pathlib.Path]) -> list[str]:
    """Returns where files of a wheel name one of these folders, one sentence each."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    return [
        f"{wheel}: {name} has {extract(content, str(folder).encode())!r}"
        for name, content in contents.items()
        for folder in folders
        if str(folder).encode() in content
    ]


def extract(content: bytes, text: bytes) -> str:
    """Returns a text and what comes after it, up to 120 bytes."""
    return content[content.index(text) :][:120].split(b"\0")[0].decode(errors="replace")


def differences(first: pathlib.Path, second: pathlib.Path) -> list[str]:
    """Returns how the wheels in two folders differ, one sentence each."""
    names = sorted({path.name for folder in (first, second) for path in folder.glob("*.whl")})
    if not names:
        return [f"there is no wheel in {first} and {second}"]
    return [text for name in names for text in differing(first / name, second / name)]


def differing(first: pathlib.Path, second: pathlib.Path) -> list[str]:
    """Returns how two wheels differ, one sentence each."""
    if missing := [path for path in (first, second) if not path.is_file()]:
        return [f"there is no {path}" for path in missing]
    if first.read_bytes() == second.read_bytes():
        return []
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        found = [
            f"{first.name}: {name} differs"
            for name in sorted({*one.namelist(), *other.namelist()})
            if member(one, name) != member(other, name)
        ]
    return found or [f"{first.name}: the files are the same, but packed differently (order, times, modes)"]


def member(archive: zipfile.ZipFile, name: str) -> bytes | None:
    """Returns the content of a file in an archive, or None if there is none of this name."""
    return archive.read(name) if name in archive.namelist() else None


if __name__ == "__main__":
    sys.exit(main())
