"""Keys and digests (HMAC with SHA-256) by which programs that share a key know each other's messages."""

from __future__ import annotations

import hashlib
import hmac
import os

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"
SECRET_LENGTH = 32
DIGEST_LENGTH = 32


def make_secret_key() -> bytes:
    """A new random key of 32 bytes."""
    return os.urandom(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """The digest of a message, 32 bytes."""
    return hmac.new(key, message, hashlib.sha256).digest()


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether the digest is that of the message; takes as long for any wrong one."""
    return hmac.compare_digest(compute_digest(key, message), digest)
