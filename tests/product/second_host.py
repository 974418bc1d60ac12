"""Two hosts for the page about the second host: systems in folders, in network namespaces with a link between them.

`ssh beta` works on alpha without a password, as the page asks for. The namespaces have no name, so they end with their
processes.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Callable, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ADDRESSES = {"alpha": "10.78.0.1", "beta": "10.78.0.2"}
# Keeps the namespaces; it ends with this program's process namespace at the latest.
HOLDER = 'hostname "$1" && ip link set lo up && exec sleep 3600'
SSHD = ["-D", "-e", "-o", "UsePAM=no", "-o", "PasswordAuthentication=no", "-o", "PidFile=none"]
PATIENCE_S = 30


class Host(NamedTuple):
    """A host.

    root  -- the folder of its system
    enter -- what is put before a command that runs in its namespaces
    """

    root: pathlib.Path
    enter: list[str]


@contextlib.contextmanager
def hosts(
    first: pathlib.Path, second: pathlib.Path, user: str, mount: Callable[[pathlib.Path], None]
) -> Iterator[tuple[Host, Host]]:
    """Makes the second system from the first one, and two hosts of them; `mount` mounts what a running system has."""
    # The mounts of the first one are not files of it.
    copy = ["cp", "--archive", "--one-file-system", str(first), str(second)]
    subprocess.run(copy, check=True)
    mount(second)
    roots = {"alpha": first, "beta": second}
    give_keys(first, second, user)
    holders = {name: hold(name) for name in roots}
    found = {name: Host(roots[name], entering(process)) for name, process in holders.items()}
    alpha, beta = (str(process.pid) for process in holders.values())
    subprocess.run(
        ["ip", "link", "add", "eth0", "netns", alpha, "type", "veth", "peer", "name", "eth0", "netns", beta], check=True
    )
    for name, host in found.items():
        for words in (["address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run([*host.enter, "ip", *words], check=True)
    (second / "run" / "sshd").mkdir(parents=True, exist_ok=True)
    log = second / "sshd.log"
    with log.open("w") as sink:
        command = [*found["beta"].enter, "chroot", str(second), "/usr/sbin/sshd", *SSHD]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT)
    try:
        await_ssh(found["alpha"], user, log)
        yield found["alpha"], found["beta"]
    finally:
        for process in [server, *holders.values()]:
            process.kill()
            process.wait()


def hold(name: str) -> subprocess.Popen[bytes]:
    """Makes the namespaces of a host, and a process that keeps them."""
    process = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", HOLDER, "sh", name])
    own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + PATIENCE_S
    while os.readlink(f"/proc/{process.pid}/ns/net") == own:
        if time.monotonic() > deadline or process.poll() is not None:
            raise AssertionError(f"no network namespace could be made for {name}")
        time.sleep(0.01)
    return process


def entering(process: subprocess.Popen[bytes]) -> list[str]:
    """What runs a command in the namespaces of a process."""
    return ["nsenter", f"--target={process.pid}", "--net", "--uts"]


def give_keys(first: pathlib.Path, second: pathlib.Path, user: str) -> None:
    """Makes `ssh beta` work on the first host: names, the user's key, and the key of the second host."""
    names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    for root in (first, second):
        (root / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # An account without a password is locked for sshd, one with an impossible password is not.
        subprocess.run(["chroot", str(root), "usermod", "--password", "*", user], check=True)
    subprocess.run(["chroot", str(second), "ssh-keygen", "-A"], check=True, stdout=subprocess.DEVNULL)
    folder = f"/home/{user}/.ssh"
    as_user = ["chroot", f"--userspec={user}", str(first)]
    subprocess.run([*as_user, "mkdir", "--mode=700", folder], check=True)
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/id_ed25519"]
    subprocess.run([*as_user, *make], check=True)
    own = first / folder[1:]
    host_key = (second / "etc" / "ssh" / "ssh_host_ed25519_key.pub").read_text().split()[:2]
    (own / "known_hosts").write_text(" ".join(["beta", *host_key]) + "\n")
    theirs = second / folder[1:]
    theirs.mkdir(mode=0o700)
    shutil.copy(own / "id_ed25519.pub", theirs / "authorized_keys")
    subprocess.run(["chroot", str(second), "chown", "-R", f"{user}:", folder], check=True)


def await_ssh(alpha: Host, user: str, log: pathlib.Path) -> None:
    """Waits until `ssh beta` comes back."""
    home = {"HOME": f"/home/{user}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    as_user = [*alpha.enter, "chroot", f"--userspec={user}", str(alpha.root)]
    command = [*as_user, "ssh", "-o", "BatchMode=yes", "beta", "true"]
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=PATIENCE_S, env=home, stdin=subprocess.DEVNULL
        )
        if done.returncode == 0:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"`ssh beta` does not work: {done.stderr}\n{log.read_text()}")
        time.sleep(0.1)
