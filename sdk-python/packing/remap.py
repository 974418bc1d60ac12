"""Which folders of this machine rustc replaces in the artefacts of the wheel, so that these do not depend on them.

A panic names the file that it comes from, by its path where it was compiled: a crate's in cargo's folder, generated
code in the target folder. The wheel's artefacts have names in place of these folders. The plugins name no file at all.
C code needs no flags: AWS-LC's build script replaces its own folder, and what else is in C has its paths in debug
information alone, which is not linked.
"""

from __future__ import annotations

import os
import pathlib
import subprocess

from artefacts import ROOT

SEPARATOR = "\x1f"


def environment(target_folder: pathlib.Path) -> dict[str, str]:
    """Returns the variable that passes the flags to cargo, with those of this process's environment before them.

    It takes the place of flags from cargo's configuration files: those of one machine have no part in the wheel.
    """
    encoded = os.environ.get("CARGO_ENCODED_RUSTFLAGS")
    own = os.environ.get("RUSTFLAGS", "").split() if encoded is None else encoded.split(SEPARATOR)
    return {"CARGO_ENCODED_RUSTFLAGS": SEPARATOR.join([*filter(None, own), *flags(target_folder)])}


def flags(target_folder: pathlib.Path) -> list[str]:
    """Returns rustc's flags that replace the folders. The last one that fits a path is applied."""
    return [f"--remap-path-prefix={folder}={name}" for folder, name in folders(target_folder).items()]


def folders(target_folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """Returns the name of each folder; one that may be inside of another comes after it."""
    return {
        ROOT: "/ronde",
        # Of the standard library, whose paths are of this form where its sources are not installed.
        pathlib.Path(rustc("--print", "sysroot").strip(), "lib/rustlib/src/rust"): f"/rustc/{compiler()}",
        cargo_home(): "/cargo",
        target_folder.absolute(): "/target",
    }


def cargo_home() -> pathlib.Path:
    """Returns cargo's folder, which has the sources of the crates."""
    return pathlib.Path(os.environ.get("CARGO_HOME") or pathlib.Path.home() / ".cargo").absolute()


def compiler() -> str:
    """Returns the commit of the compiler."""
    lines = dict(line.split(": ", 1) for line in rustc("--version", "--verbose").splitlines() if ": " in line)
    return lines["commit-hash"]


def rustc(*arguments: str) -> str:
    """Returns what the compiler prints that cargo would use."""
    command = [os.environ.get("RUSTC", "rustc"), *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
