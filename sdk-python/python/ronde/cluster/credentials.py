"""By what the sidecars of several nodes authenticate each other.

The user names a file with a secret, or a directory of certificates, which each node has already. Where the engine's own
connections are encrypted and authenticated, a secret that is drawn for each job may travel over them instead.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import ssl
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ronde import own_sidecar
from ronde.errors import RondeError
from ronde.private_folder import PrivateFolder, own_base

if TYPE_CHECKING:
    from collections.abc import Iterator

CERTS, SECRET_FILE = f"{own_sidecar.PREFIX}CERTS", f"{own_sidecar.PREFIX}JOB_SECRET_FILE"
_SECRET_HEADER = "ronde job secret 1"
_IDENTITY = re.compile(r"spiffe://[^/]+/job/([^/]+)/sidecar/(\d+)")


@dataclass(frozen=True)
class Credentials:
    """What each node's sidecar is started with; at most one of them is set, and none if there is one sidecar.

    certs       -- the path of the directory with the certificate of the node
    secret_file -- the path of the file with the secret of all nodes
    secret      -- the secret itself, 64 hexadecimal digits, which the engine's connections protect on their way
    """

    certs: str | None = None
    secret_file: str | None = None
    secret: str | None = None

    def __repr__(self) -> str:
        kind = next((name for name in ("certs", "secret_file", "secret") if getattr(self, name) is not None), "none")
        return f"Credentials({kind})"


def drawn() -> Credentials:
    """Returns a new secret for one job, which only encrypted and authenticated connections may carry."""
    return Credentials(secret=secrets.token_hex(32))


def named(certs: str | None, secret_file: str | None) -> Credentials:
    """Returns the credentials that the caller names, else those that this process's variables name.

    Raises ValueError if both are given.
    """
    if certs is None and secret_file is None:
        certs, secret_file = os.environ.get(CERTS), os.environ.get(SECRET_FILE)
    if certs and secret_file:
        raise ValueError(
            f"certs ({CERTS}) and job_secret_file ({SECRET_FILE}) are both given; give the one that all nodes have"
        )
    return Credentials(certs or None, secret_file or None)


@contextlib.contextmanager
def options(credentials: Credentials, index: int, job: str) -> Iterator[list[str]]:
    """Yields options of `ronde sidecar` for these credentials; the sidecar has read them when the block ends.

    A secret that has come over the engine's connections is in a file of a private directory for this block only.
    """
    if credentials.certs is not None:
        yield ["--certs", credentials.certs]
        return
    numbered = ["--job", job, "--index", str(index)]
    if credentials.secret_file is not None:
        yield ["--job-secret-file", credentials.secret_file, *numbered]
        return
    with in_file(credentials) as path:
        yield ["--job-secret-file", path, *numbered]


@contextlib.contextmanager
def in_file(credentials: Credentials) -> Iterator[str]:
    """Yields the path of a file with the secret, in a private directory for this block only."""
    with tempfile.TemporaryDirectory(prefix=f"ronde-secret-{os.getuid()}-", dir=own_base()) as name:
        with contextlib.closing(PrivateFolder(pathlib.Path(name))) as folder:
            folder.write("job-secret", f"{_SECRET_HEADER}\n{credentials.secret}\n".encode())
        yield f"{name}/job-secret"


def of_certificate(path: str) -> tuple[str, int]:
    """Returns the job and the index that the certificate in this node's directory names.

    Raises RondeError with cause "settings" if there is none. The sidecar verifies the certificate; this only numbers
    the nodes.
    """
    file = pathlib.Path(path) / "cert.pem"
    try:
        decoded = ssl._ssl._test_decode_cert(str(file))  # type: ignore[attr-defined]
        found = [_IDENTITY.fullmatch(value) for kind, value in decoded.get("subjectAltName", ()) if kind == "URI"]
        (identity,) = [match for match in found if match]
    except (OSError, ValueError) as error:
        raise RondeError(
            f"{file} on {os.uname().nodename} cannot be read as the certificate of a sidecar ({error}); copy the "
            "directory that `ronde certs once` or `ronde certs issue` made for this node to this path",
            "settings",
        ) from error
    return identity[1], int(identity[2])
