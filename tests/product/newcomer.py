"""Follows README.md's quickstart in a fresh Debian, with only the packages that README.md lists.

    make newcomer-test

The system is made by debootstrap from the mirror that this machine's apt uses, with the packages of the README's
`apt-get install` line and nothing else: no compiler, no cargo. In it an ordinary user follows the quickstart of
README.md. The wheel is that in `dist/`; what pip fetches comes from the index that pip uses here.
Needs root. All mounts belong to a mount namespace and all processes to a process namespace that end with this program,
whatever happens; then the folder is removed.
"""

from __future__ import annotations

import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from blocks import Block, of_section
from terminal import BlockError, Terminal

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
SECTION = "Quickstart"
USER = "newcomer"
# Variables that configure pip and TLS libraries for a proxy or a mirror, if they are set.
CARRIED = re.compile(
    r"(?i)(PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|CERT|PROXY|DEFAULT_TIMEOUT)|(https?|no|all)_proxy"
    r"|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE)"
)
# Which of them name files.
FILES = {"PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
PIP_CONFIGURATIONS = ["/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf"]
# This program calls itself within the namespaces, with the folder as argument.
WITHIN = "--within"
NAMESPACES = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]


def main() -> int:
    """Makes the namespaces and removes what is left; returns the process's exit status."""
    if sys.argv[1:2] == [WITHIN]:
        return follow(pathlib.Path(sys.argv[2]))
    if problem := unfit():
        print(f"newcomer-test: {problem}", file=sys.stderr)
        return 1
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ronde-newcomer-") as folder:
        command = [*NAMESPACES, sys.executable, __file__, WITHIN, folder]
        process = subprocess.Popen(command)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            # The namespaces' first process ends with its parent, and everything in them with it.
            process.kill()
            status = process.wait()
    if status == 0:
        print(f"newcomer-test: passed in {time.monotonic() - start:.0f} s")
    return status


def unfit() -> str | None:
    """Why this machine cannot do it."""
    if os.geteuid() != 0:
        return "needs root, to make a system in a folder"
    missing = [name for name in ["debootstrap", "unshare", "chroot", "apt-get"] if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install debootstrap)"
    return None if wheels() else "there is no wheel in dist/; run `make wheel` first"


def wheels() -> list[pathlib.Path]:
    """The wheels for this kind of machine."""
    return sorted((ROOT / "dist").glob(f"ronde-*_{os.uname().machine}.whl"))


def follow(folder: pathlib.Path) -> int:
    """Makes the system and follows the quickstart in it. Runs within the namespaces."""
    root = folder / "root"
    blocks = of_section(README, SECTION)
    packages = listed_packages(blocks)
    report(f"making a system with {' and '.join(packages)} by debootstrap")
    make_system(root, packages, folder / "debootstrap.log")
    mount(root)
    environment = carry_settings(root)
    home = root / "home" / USER
    (home / "state").mkdir()
    terminal = Terminal(home, environment, ["chroot", f"--userspec={USER}", str(root)], str(root))
    (terminal.work / "dist").mkdir()
    for wheel in wheels():
        shutil.copy(wheel, terminal.work / "dist")
    subprocess.run(["chroot", str(root), "chown", "-R", f"{USER}:", f"/home/{USER}"], check=True)
    run_blocks(terminal, blocks)
    return 0


def run_blocks(terminal: Terminal, blocks: list[Block]) -> None:
    """Runs the blocks, and prints their output."""
    ran = [
        block for block in blocks if block.not_run is None and (block.language in {"sh", "python"} or block.is_output)
    ]
    if not any(block.is_output for block in ran):
        sys.exit(f"{README.name}: the section {SECTION} promises no output; nothing would be checked")
    for block in ran:
        start = time.monotonic()
        try:
            terminal.run(block)
        except BlockError as error:
            sys.exit(f"newcomer-test: {error}")
        if block.is_output:
            report(f"{block}: printed as promised: {block.text}")
        else:
            report(f"{block}: done in {time.monotonic() - start:.0f} s\n{terminal.output.rstrip()}")


def listed_packages(blocks: list[Block]) -> list[str]:
    """The packages of the README's `apt-get install` line."""
    lines = [line for block in blocks for line in block.text.splitlines() if "apt-get install" in line]
    if len(lines) != 1:
        sys.exit(f"{README.name}: one line of the section {SECTION} must contain `apt-get install`, not {len(lines)}")
    return lines[0].split("#")[0].split("apt-get install", 1)[1].split()


def make_system(root: pathlib.Path, packages: list[str], log: pathlib.Path) -> None:
    """A minimal system with some packages and an ordinary user."""
    mirror, suite = mirror_and_suite()
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", suite, str(root), mirror]
    with log.open("w") as sink:
        status = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        sys.exit(f"debootstrap ended with status {status}:\n" + "\n".join(log.read_text().splitlines()[-20:]))
    compilers = ["cc", "gcc", "clang", "cargo", "rustc", "protoc", "make"]
    found = [name for name in compilers if shutil.which(name, path=":".join(f"{root}{path}" for path in STANDARD_PATH))]
    if found:
        sys.exit(f"the fresh system has {found}; the test would show nothing")
    subprocess.run(["chroot", str(root), "useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)


STANDARD_PATH = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]


def mirror_and_suite() -> tuple[str, str]:
    """Debian's mirror as this machine's apt knows it, and its stable release; on Ubuntu, the machine's own."""
    template = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    known = subprocess.run(template, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in known:
        origin, codename, mirror = line.split(" ", 2)
        if origin in {"Debian", "Ubuntu"} and "-" not in codename:
            return mirror, "stable" if origin == "Debian" else codename
    sys.exit("newcomer-test: apt knows no mirror of Debian or Ubuntu")


def mount(root: pathlib.Path) -> None:
    """What a running system has: processes, devices, shared memory. The mounts end with the namespace."""
    for kind, place in [("proc", "proc"), ("sysfs", "sys"), ("tmpfs", "dev"), ("tmpfs", "tmp"), ("tmpfs", "run")]:
        options = "ro" if kind == "sysfs" else "mode=1777" if place == "tmp" else "mode=0755"
        target = ["-o", options] if kind != "proc" else []
        subprocess.run(["mount", "-t", kind, *target, kind, str(root / place)], check=True)
    for device in ["null", "zero", "full", "random", "urandom", "tty"]:
        (root / "dev" / device).touch()
        subprocess.run(["mount", "--bind", f"/dev/{device}", str(root / "dev" / device)], check=True)
    os.symlink("/proc/self/fd", root / "dev" / "fd")
    (root / "dev" / "shm").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(root / "dev" / "shm")], check=True)


def carry_settings(root: pathlib.Path) -> dict[str, str]:
    """The variables of the newcomer: how pip reaches its index from this network, and nothing else of this machine."""
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    carried = {name: value for name, value in os.environ.items() if CARRIED.fullmatch(name)}
    bundles = {carried[name] for name in FILES & carried.keys()}
    for place in PIP_CONFIGURATIONS:
        path = pathlib.Path(place).expanduser()
        if path.is_file():
            shutil.copy(path, root / "etc" / "pip.conf")
            (root / "etc" / "pip.conf").chmod(0o644)
            configuration = configparser.ConfigParser(interpolation=None)
            configuration.read(path)
            bundles |= {section["cert"] for section in configuration.values() if "cert" in section}
    for bundle in bundles:
        if pathlib.Path(bundle).is_file():
            copy = root / bundle.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(bundle, copy)
            copy.chmod(0o644)
    return {**carried, "HOME": f"/home/{USER}", "PATH": ":".join(STANDARD_PATH), "LC_ALL": "C.UTF-8", "TERM": "dumb"}


def report(text: str) -> None:
    """Prints a line of progress."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
