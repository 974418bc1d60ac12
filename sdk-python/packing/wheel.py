"""Builds the wheel: SDK, extension module, the command `ronde`, NCCL's net plugin and the plugins, for Linux and every
Python from 3.9 on. Also builds the small wheel of horovod-compat, which depends on this one.

    make wheel                                          for this machine's kind of processor
    make wheel WHEEL_TARGET=aarch64-unknown-linux-gnu   for another, compiled here

zig compiles both artefacts against glibc 2.28; it includes the libraries of all versions and machines. The build fails
if one of them requires more than manylinux_2_28 guarantees. The artefacts have names in place of this machine's folders
(`remap.py`), so that a wheel does not depend on where it is made; `reproduce.py` checks that. With `--dev` the
artefacts are those of `make build`: the same packaging in seconds, for this machine only.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tempfile
import zipfile

from artefacts import FILES, PACKAGES, ROOT, options
from notices import notices
from remap import environment as remapped
from sbom import text as sbom

GLIBC = (2, 28)
WHEEL_BYTES_MAX = 40_000_000
# Libraries that manylinux_2_28 guarantees, as far as Rust's artefacts use them.
LIBRARIES = re.compile(r"(libc|libm|libdl|libpthread|librt|libutil|libgcc_s|ld-linux-(x86-64|aarch64))\.so\.\d+")
# Machines by readelf's name, and their name in the wheel's tag.
MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}


def main() -> int:
    """Builds the wheels. Returns the process's exit status."""
    arguments = parsed(sys.argv[1:])
    target_folder = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.dev:
        folder, platform = target_folder / "debug", f"linux_{os.uname().machine}"
    else:
        folder = compiled(arguments.target, target_folder)
        platform = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{arguments.target.split('-')[0]}"
    artefacts = [folder / name for name in FILES]
    if not arguments.dev:
        offences = [text for path in artefacts for text in too_new(path, GLIBC)]
        if offences:
            sys.exit("this is no manylinux_2_28 wheel:\n" + "\n".join(offences))
        environment = {**os.environ, "CARGO_TARGET_DIR": str(target_folder)}
        subprocess.run(["make", "--silent", "plugins"], cwd=ROOT, env=environment, check=True)
    plugins = target_folder / "plugins"
    path = packed(artefacts, plugins, platform, arguments.target, arguments.out)
    describe(path)
    compat(arguments.out)
    return 0 if path.stat().st_size <= WHEEL_BYTES_MAX else f"{path} is larger than {WHEEL_BYTES_MAX:,} bytes"


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=f"{os.uname().machine}-unknown-linux-gnu", help="as rustc names it")
    parser.add_argument("--dev", action="store_true", help="package what `make build` has built")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist", help="the folder for the wheel")
    return parser.parse_args(arguments)


def compiled(target: str, target_folder: pathlib.Path) -> pathlib.Path:
    """Compiles the artefacts for a target and glibc 2.28. Returns their folder."""
    installed = subprocess.run(["rustup", "target", "list", "--installed"], check=False, capture_output=True, text=True)
    if installed.returncode == 0 and target not in installed.stdout.split():
        subprocess.run(["rustup", "target", "add", target], check=True)
    tools = str(pathlib.Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "RONDE_COMMIT": commit()}
    environment |= remapped(target_folder)
    versioned = f"{target}.{GLIBC[0]}.{GLIBC[1]}"
    cargo = os.environ.get("CARGO", "cargo")
    command = [cargo, "zigbuild", "--locked", "--release", "--target", versioned, *options(PACKAGES)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return target_folder / target / "release"


def commit() -> str:
    """Returns the commit of the checkout, or an empty string outside of one."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(describe, cwd=ROOT, check=False, capture_output=True, text=True).stdout.strip()


def packed(
    artefacts: list[pathlib.Path], plugins: pathlib.Path, platform: str, target: str, out: pathlib.Path
) -> pathlib.Path:
    """Packs the wheel, with the licences and the list of what is compiled into it. Returns its path."""
    binary, extension, nccl_net = (str(path) for path in artefacts)
    named = {"RONDE_WHEEL_BINARY": binary, "RONDE_WHEEL_EXTENSION": extension, "RONDE_WHEEL_PLATFORM": platform}
    named["RONDE_WHEEL_PLUGINS"] = str(plugins)
    named["RONDE_WHEEL_NCCL_NET"] = nccl_net
    pattern = f"ronde-*-{platform}.whl"
    for former in out.glob(pattern):
        former.unlink()
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out.resolve())]
    # A fixed time for all files makes the wheel reproducible. zip supports none before 1980.
    environment = {**os.environ, **named, "SOURCE_DATE_EPOCH": "1577836800"}
    with tempfile.TemporaryDirectory() as folder:
        # Under its name here it is in the wheel's folder `sboms` (PEP 770).
        licences, components = pathlib.Path(folder, "licences.txt"), pathlib.Path(folder, "ronde.cdx.json")
        licences.write_text(notices(target))
        components.write_text(sbom(target))
        environment |= {"RONDE_WHEEL_NOTICES": str(licences), "RONDE_WHEEL_SBOM": str(components)}
        subprocess.run(command, cwd=ROOT / "sdk-python", env=environment, check=True)
    (path,) = out.glob(pattern)
    return path


def compat(out: pathlib.Path) -> pathlib.Path:
    """Packs horovod-compat with its own builder, for every processor. Returns its path."""
    for former in out.glob("horovod_compat-*.whl"):
        former.unlink()
    path = out / runpy.run_path(str(ROOT / "sdk-python" / "horovod-compat" / "backend.py"))["build_wheel"](str(out))
    print(f"{path}: {path.stat().st_size / 1e3:.1f} kB")
    return path


def too_new(path: pathlib.Path, glibc: tuple[int, int]) -> list[str]:
    """Returns the libraries and symbols that an artefact requires and a system with this glibc lacks."""
    versions = set(re.findall(r"Name: GLIBC_(\d+)\.(\d+)", readelf("-V", path)))
    symbols = [f"GLIBC_{major}.{minor}" for major, minor in sorted(versions) if (int(major), int(minor)) > glibc]
    libraries = [
        name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", path)) if not LIBRARIES.fullmatch(name)
    ]
    return [f"{path} asks for {name}" for name in [*symbols, *libraries]]


def machine(path: pathlib.Path) -> str:
    """Returns the processor of an artefact."""
    name = re.search(r"Machine:\s+(.+)", readelf("-h", path))
    return MACHINES.get(name[1].strip(), name[1]) if name else "none: this is no program"


def readelf(option: str, path: pathlib.Path) -> str:
    """Returns readelf's output; it reads programs for all machines."""
    return subprocess.run(["readelf", "-W", option, str(path)], check=True, capture_output=True, text=True).stdout


def describe(path: pathlib.Path) -> None:
    """Prints the sizes of the wheel and its files."""
    with zipfile.ZipFile(path) as wheel:
        large = sorted(wheel.infolist(), key=lambda entry: -entry.file_size)[:2]
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    for entry in large:
        print(f"    {entry.filename}: {entry.file_size / 1e6:.1f} MB, {entry.compress_size / 1e6:.1f} MB packed")


if __name__ == "__main__":
    sys.exit(main())
