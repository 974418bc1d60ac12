"""Prepares a pod for its sidecar: writes its configuration, and copies its credentials so that it accepts them.

    python3 prepare.py [--credentials DIR] [--files-of-others] [--tools DIR] [--follow] OUT

Files of a Secret belong to root, and a sidecar rejects keys of another user (docs/KEYS.md). So this runs as the
sidecar's user, in an init container that alone mounts the Secret, and copies what this pod's sidecar needs to OUT, a
volume in memory that no worker mounts. The variables that describe the pod are those of `pod.py`.

DIR has `job-secret` (`ronde certs secret`), or the files of sidecars with their index in the name:
`sidecar-0-cert.pem`, `sidecar-0-key.pem`, and `sidecar-0-ca.pem` or one `ca.pem` for all. Only this pod's are copied.

OUT/sidecar.toml             for `ronde sidecar --config`
OUT/credentials/             job-secret, or cert.pem, key.pem and ca.pem; mode 0400

--files-of-others  another program fills OUT/credentials, such as spiffe-helper; nothing is copied
--tools DIR        copy workers.py and what it imports to DIR: images of workers need nothing but python3 and ronde
--follow           continue to copy whenever the files change, for certificates that are renewed; never ends
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import sys
import time

import pod
from pod import Pod, PodError

SECRET = "job-secret"
CERTIFICATES = ["cert.pem", "key.pem", "ca.pem"]
TOOLS = ["workers.py", "pod.py"]
# Larger than any key, certificate or list of authorities that a sidecar reads.
FILE_BYTES_MAX = 256 << 10
# The kubelet itself takes about a minute to update a mounted Secret.
FOLLOW_INTERVAL_S = 5.0


def main() -> int:
    """Prepares the pod; returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT")
    parser.add_argument("--credentials", type=pathlib.Path, default="/secret", metavar="DIR")
    parser.add_argument("--files-of-others", action="store_true")
    parser.add_argument("--tools", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--follow", action="store_true")
    arguments = parser.parse_args()
    # The first process of a container ignores signals without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        this = pod.of_environment(os.environ)
        files = {} if arguments.files_of_others else files_of(arguments.credentials, this.index)
        copy(files, arguments.out / "credentials")
        write(arguments.out / "sidecar.toml", configuration(this, arguments.out, SECRET in files).encode(), 0o444)
        ranks = f"ranks {this.ranks.start} to {this.ranks.stop - 1} of {this.size}"
        print(f"job {this.job}, sidecar {this.index} of {this.nodes}: {ranks}, peers {', '.join(this.peers)}")
        if arguments.tools:
            for name in TOOLS:
                shutil.copyfile(pathlib.Path(__file__).with_name(name), arguments.tools / name)
        if arguments.follow:
            follow(arguments.credentials, this.index, arguments.out / "credentials", files)
    except (PodError, OSError) as error:
        print(f"ronde-prepare: the sidecar cannot start: {error}", file=sys.stderr)
        return 1
    return 0


def configuration(this: Pod, out: pathlib.Path, has_secret: bool) -> str:
    """Returns the text of the sidecar's configuration file."""
    if not this.peers:
        raise PodError("RONDE_HOSTS is not set; it is a pod's name in DNS: train-node-0-{}.train")
    values: dict[str, object] = {"peers": list(this.peers), "placement": this.placement}
    if has_secret:
        values |= {"job": this.job, "index": this.index, "job-secret-file": str(out / "credentials" / SECRET)}
    else:
        values["certs"] = str(out / "credentials")
    # These strings, numbers and lists are written in JSON as in TOML.
    return "[sidecar]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def files_of(source: pathlib.Path, index: int) -> dict[str, bytes]:
    """Reads the credentials of one sidecar, by the names that the sidecar gives them.

    Raises PodError with the names that were expected when some are missing.
    """
    # Another process may replace the files at any time, so this opens each without a check that it exists.
    held = sorted(path.name for path in source.glob("[!.]*"))
    secret = read(source / SECRET)
    if secret is not None:
        return {SECRET: secret}
    own = {name: source / f"sidecar-{index}-{name}" for name in CERTIFICATES}
    found = {name: read(path) for name, path in own.items()}
    if found["ca.pem"] is None:
        own["ca.pem"] = source / "ca.pem"
        found["ca.pem"] = read(own["ca.pem"])
    files = {name: content for name, content in found.items() if content is not None}
    missing = [path.name for name, path in own.items() if name not in files]
    if missing:
        others = [name for name in held if name not in {SECRET, *missing}] or ["nothing"]
        text = f"neither {SECRET} nor {', '.join(missing)} is in {source}, which has {', '.join(others)}"
        raise PodError(f"{text}; see compose/kubernetes/README.md for how to make the Secret")
    return files


def read(path: pathlib.Path) -> bytes | None:
    """Reads a file of bounded size. Returns None if there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    if len(content) > FILE_BYTES_MAX:
        raise PodError(f"{path} is longer than {FILE_BYTES_MAX} bytes; it is no key or certificate")
    return content


def copy(files: dict[str, bytes], folder: pathlib.Path) -> None:
    """Writes files that this user alone can read, into a folder of its own."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, content in files.items():
        write(folder / name, content, 0o400)


def write(path: pathlib.Path, content: bytes, mode: int) -> None:
    """Replaces a file at once, so that a reader never sees a part of it."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.chmod(fresh, mode)
    fresh.rename(path)


def follow(source: pathlib.Path, index: int, folder: pathlib.Path, copied: dict[str, bytes]) -> None:
    """Copies the files again whenever they change. A mistake in them is printed once and retried."""
    mistake = None
    while True:
        time.sleep(FOLLOW_INTERVAL_S)
        try:
            files = files_of(source, index)
            if files != copied:
                copy(files, folder)
                copied, mistake = files, None
                print("the sidecar's credentials have been replaced", flush=True)
        except (PodError, OSError) as error:
            if str(error) != mistake:
                mistake = str(error)
                print(f"ronde-prepare: the old credentials stay: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
