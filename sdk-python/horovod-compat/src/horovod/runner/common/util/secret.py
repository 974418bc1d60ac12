"""Keys and digests (HMAC with SHA-256) that authenticate messages between programs with a shared key."""

from __future__ import annotations

import hashlib
import hmac
import os

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"
SECRET_LENGTH = 32
DIGEST_LENGTH = 32


def make_secret_key() -> bytes:
    """Returns a new random key of 32 bytes."""
    return os.urandom(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """Returns the digest of a message, 32 bytes."""
    return hmac.new(key, message, hashlib.sha256).digest()


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Returns whether a digest is that of a message, in constant time."""
    return hmac.compare_digest(compute_digest(key, message), digest)
