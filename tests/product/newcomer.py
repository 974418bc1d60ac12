"""Follows README.md and docs/QUICKSTART.md in fresh systems, with only the packages that the pages list.

    make newcomer-test

1. In a system with the packages of the section "Build the wheel", an ordinary user clones the last commit of this
   checkout and makes the wheel. RONDE_NEWCOMER_WHEEL=1 takes the wheel in `dist/` instead.
   The block that installs Rust is NOT run unless RONDE_NEWCOMER_RUSTUP=1 is set, as not every machine reaches
   static.rust-lang.org. Without that variable the toolchain is this machine's, and crates and what they compile to are
   kept in RONDE_CACHE, so that only the first run takes long.
2. In a system without a compiler, another one installs that wheel and follows the section "Install and run", and the
   quickstart but for its training, which needs PyTorch.
3. A copy of that system is a second host, `beta`: both are network namespaces with a link between them, and sshd on
   beta.

The systems are made by debootstrap from the mirror that this machine's apt uses: Debian's stable release, or on Ubuntu
this machine's release. RONDE_NEWCOMER_SUITE names another release of either, such as `bookworm` or `jammy`, which comes
from RONDE_NEWCOMER_MIRROR or debootstrap's own mirror for it. What pip fetches comes from the index that pip uses here.
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

from blocks import Block, blocks, of_section
from second_host import Host, hosts
from terminal import BlockError, Terminal

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "QUICKSTART.md"
BUILD, INSTALL, TRAINING, SECOND_HOST = "Build the wheel", "Install and run", "The first training", "The second host"
# A reason that contains this is one for other tests: this one runs the block.
RUNS_IT = "`make newcomer-test` runs"
# A block whose reason also contains this is run only if the variable is set.
RUSTUP = "RONDE_NEWCOMER_RUSTUP=1"
USER = "newcomer"
REPOSITORY = "https://github.com/ronde-project/ronde"
# The first build compiles everything.
BUILD_TIMEOUT_S = 3_600
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
    tools = ["debootstrap", "unshare", "nsenter", "chroot", "apt-get", "git", "ip"]
    tools += [] if takes_wheel() or installs_rust() else ["cargo", "rustup"]
    missing = [name for name in tools if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install debootstrap git iproute2; Rust from https://rustup.rs)"
    if takes_wheel() and not wheels(ROOT / "dist"):
        return "there is no wheel in dist/; run `make wheel` first, or do not set RONDE_NEWCOMER_WHEEL"
    if os.environ.get("RONDE_NEWCOMER_MIRROR") and not os.environ.get("RONDE_NEWCOMER_SUITE"):
        return "RONDE_NEWCOMER_MIRROR needs RONDE_NEWCOMER_SUITE, the release to take from there"
    return unfit_for(named) if (named := os.environ.get("RONDE_NEWCOMER_SUITE")) else None


def unfit_for(suite: str) -> str | None:
    """Why this machine cannot make a system of a release."""
    if not (SCRIPTS / suite).exists():
        return f"debootstrap knows no release {suite!r} (RONDE_NEWCOMER_SUITE); those that it knows are in {SCRIPTS}"
    owner = distribution(suite)
    keys = KEYRINGS / f"{owner}-archive-keyring.gpg"
    if not keys.exists():
        return (
            f"needs {keys}, the keys that sign {suite} (apt-get install {KEY_PACKAGES[owner]}; "
            "Debian 12 has no package with Ubuntu's keys)"
        )
    return None


# How debootstrap makes each release, and the keys that sign the releases.
SCRIPTS = pathlib.Path("/usr/share/debootstrap/scripts")
KEYRINGS = pathlib.Path("/usr/share/keyrings")
KEY_PACKAGES = {"debian": "debian-archive-keyring", "ubuntu": "ubuntu-keyring"}


def distribution(suite: str) -> str:
    """Whose release it is: `debian` or `ubuntu`, by the keys that debootstrap checks it with."""
    return "ubuntu" if "ubuntu-archive-keyring" in (SCRIPTS / suite).read_text() else "debian"


def takes_wheel() -> bool:
    """Whether the wheel in `dist/` is taken, and none is built."""
    return os.environ.get("RONDE_NEWCOMER_WHEEL") == "1"


def installs_rust() -> bool:
    """Whether the block that installs Rust is run. If not, the toolchain is this machine's."""
    return os.environ.get("RONDE_NEWCOMER_RUSTUP") == "1"


def wheels(folder: pathlib.Path) -> list[pathlib.Path]:
    """The wheels for this kind of machine."""
    return sorted(folder.glob(f"ronde-*_{os.uname().machine}.whl"))


def follow(folder: pathlib.Path) -> int:
    """Follows the pages. Runs within the namespaces."""
    # The numbers of processes in /proc are those of this namespace.
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    dist = ROOT / "dist" if takes_wheel() else build(folder)
    quickstart = [block for block in blocks(QUICKSTART.name, QUICKSTART.read_text()) if block.heading != TRAINING]
    root = folder / "root"
    report(f"making a system with {' and '.join(listed_packages(INSTALL))}")
    make_system(root, [*listed_packages(INSTALL), *SSH], folder / "debootstrap.log")
    refuse_compilers(root)
    mount(root)
    terminal = terminal_in(root, carry_settings(root), ["chroot", f"--userspec={USER}", str(root)])
    (terminal.work / "dist").mkdir()
    for wheel in wheels(dist):
        shutil.copy(wheel, terminal.work / "dist")
    own(root)
    run_blocks(terminal, of_section(README, INSTALL))
    run_blocks(terminal, [block for block in quickstart if block.heading != SECOND_HOST])
    with hosts(root, folder / "beta", USER, mount) as (alpha, _):
        terminal.within = on(alpha)
        run_blocks(terminal, [block for block in quickstart if block.heading == SECOND_HOST])
    return 0


# What `ssh beta` needs on both hosts.
SSH = ["openssh-client", "openssh-server"]


def on(host: Host) -> list[str]:
    """What is put before a command of the user on a host."""
    return [*host.enter, "chroot", f"--userspec={USER}", str(host.root)]


def build(folder: pathlib.Path) -> pathlib.Path:
    """Clones this checkout and makes the wheel, as the section says. Returns the folder with the wheel."""
    root = folder / "builder"
    packages = listed_packages(BUILD)
    report(f"making a system with {' and '.join(packages)}")
    make_system(root, packages, folder / "builder.log")
    mount(root)
    environment = carry_settings(root) | carry_certificates()
    if installs_rust():
        report("Rust is installed as the page says")
    else:
        report(f"NOT RUN: the block that installs Rust. The toolchain is this machine's; {RUSTUP} runs the block")
        environment |= carry_rust(root)
    publish(root)
    terminal = terminal_in(root, environment, ["chroot", f"--userspec={USER}", str(root)])
    terminal.patience_s = BUILD_TIMEOUT_S
    own(root)
    run_blocks(terminal, of_section(README, BUILD))
    found = pathlib.Path(terminal.current_folder()) / "dist"
    if not wheels(found):
        sys.exit(f"newcomer-test: {found} has no wheel")
    return found


def carry_rust(root: pathlib.Path) -> dict[str, str]:
    """This machine's toolchain of Rust, read-only; crates and compiled ones in folders that outlive this program."""
    home = pathlib.Path(os.environ.get("CARGO_HOME") or pathlib.Path.home() / ".cargo")
    toolchains = pathlib.Path(os.environ.get("RUSTUP_HOME") or pathlib.Path.home() / ".rustup")
    cache = pathlib.Path(os.environ.get("RONDE_CACHE") or pathlib.Path.home() / ".cache" / "ronde") / "newcomer"
    (cache / "target").mkdir(parents=True, exist_ok=True)
    registry = cache / "cargo" / "registry"
    if not registry.exists() and (home / "registry" / "cache").is_dir():
        # What this machine has downloaded already.
        for part in ("index", "cache"):
            shutil.copytree(home / "registry" / part, registry / part)
    for source, place, options in [
        (home / "bin", "opt/rust", "bind,ro"),
        (toolchains, "opt/rustup", "bind,ro"),
        (cache / "cargo", f"home/{USER}/.cargo", "bind"),
        (cache / "target", f"home/{USER}/target", "bind"),
    ]:
        (root / place).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", str(source), str(root / place)], check=True)
        if options.endswith("ro"):
            subprocess.run(["mount", "-o", f"remount,{options}", str(root / place)], check=True)
    own_by_user = ["chroot", str(root), "chown", "-R", f"{USER}:", f"/home/{USER}/.cargo", f"/home/{USER}/target"]
    subprocess.run(own_by_user, check=True)
    return {
        "PATH": ":".join(["/opt/rust", *STANDARD_PATH]),
        "RUSTUP_HOME": "/opt/rustup",
        "CARGO_TARGET_DIR": f"/home/{USER}/target",
    }


def carry_certificates() -> dict[str, str]:
    """The certificates with which cargo checks servers, if variables of this machine name some."""
    bundle = next((os.environ[name] for name in FILES if os.environ.get(name)), None)
    return {"CARGO_HTTP_CAINFO": bundle} if bundle else {}


def publish(root: pathlib.Path) -> None:
    """Puts the last commit of this checkout where the address of the repository leads in the system."""
    repository = root / "srv" / "ronde.git"
    subprocess.run(["git", "clone", "--quiet", "--bare", "--no-local", str(ROOT), str(repository)], check=True)
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True).stdout:
        report("changes of this checkout that are not committed are not in the clone")
    lines = [f'[url "file:///srv/ronde.git"]\n\tinsteadOf = {REPOSITORY}', "[safe]\n\tdirectory = *"]
    (root / "etc" / "gitconfig").write_text("\n".join(lines) + "\n")


def terminal_in(root: pathlib.Path, environment: dict[str, str], within: list[str]) -> Terminal:
    """The user's terminal in a system."""
    home = root / "home" / USER
    (home / "state").mkdir()
    return Terminal(home, environment, within, str(root))


def own(root: pathlib.Path) -> None:
    """Gives the user what was put into their home."""
    subprocess.run(["chroot", str(root), "chown", "-R", f"{USER}:", f"/home/{USER}"], check=True)


def run_blocks(terminal: Terminal, wanted: list[Block]) -> None:
    """Runs the blocks, and prints their output."""
    ran = [block for block in wanted if is_meant(block) and (block.language in RUN or block.is_output)]
    if not ran:
        sys.exit("newcomer-test: a section has nothing to run; nothing would be checked")
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


def is_meant(block: Block) -> bool:
    """Whether a block is one that this program runs."""
    if block.not_run is None:
        return True
    return RUNS_IT in block.not_run and (installs_rust() or RUSTUP not in block.not_run)


def listed_packages(section: str) -> list[str]:
    """The packages of a section's `apt-get install` line."""
    lines = [line for block in of_section(README, section) for line in block.text.splitlines() if APT in line]
    if len(lines) != 1:
        sys.exit(f"{README.name}: one line of the section {section} must contain `{APT}`, not {len(lines)}")
    return lines[0].split("#")[0].split(APT, 1)[1].split()


APT = "apt-get install"
RUN = {"sh", "python"}


def make_system(root: pathlib.Path, packages: list[str], log: pathlib.Path) -> None:
    """A minimal system with some packages and an ordinary user."""
    with log.open("w") as sink:
        command = debootstrap(root, packages)
        status = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        sys.exit(f"debootstrap ended with status {status}:\n" + "\n".join(log.read_text().splitlines()[-20:]))
    subprocess.run(["chroot", str(root), "useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)


def debootstrap(root: pathlib.Path, packages: list[str]) -> list[str]:
    """The command that makes a minimal system."""
    suite, *mirror = suite_and_mirror()
    # Ubuntu has python3-venv in universe.
    components = "main,universe" if distribution(suite) == "ubuntu" else "main"
    options = ["--variant=minbase", f"--components={components}", f"--include={','.join(packages)}"]
    return ["debootstrap", *options, suite, str(root), *mirror]


def refuse_compilers(root: pathlib.Path) -> None:
    """Ends the test if the system could compile anything."""
    compilers = ["cc", "gcc", "clang", "cargo", "rustc", "protoc", "make"]
    found = [name for name in compilers if shutil.which(name, path=":".join(f"{root}{path}" for path in STANDARD_PATH))]
    if found:
        sys.exit(f"the fresh system has {found}; the test would show nothing")


STANDARD_PATH = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]


def suite_and_mirror() -> list[str]:
    """The release that RONDE_NEWCOMER_SUITE names, and RONDE_NEWCOMER_MIRROR if it is set.

    Else Debian's stable release, and its mirror as this machine's apt knows it; on Ubuntu, the machine's own release.
    """
    if suite := os.environ.get("RONDE_NEWCOMER_SUITE"):
        return [suite, *filter(None, [os.environ.get("RONDE_NEWCOMER_MIRROR")])]
    template = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(REPO_URI)", "Created-By: Packages"]
    known = subprocess.run(template, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in known:
        origin, codename, mirror = line.split(" ", 2)
        if origin in {"Debian", "Ubuntu"} and "-" not in codename:
            return ["stable" if origin == "Debian" else codename, mirror]
    sys.exit("newcomer-test: apt knows no mirror of Debian or Ubuntu; name a release with RONDE_NEWCOMER_SUITE")


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
