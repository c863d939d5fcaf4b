"""Secrets of clients: 32 bytes each from the system's entropy, from which noise is derived.

Noise that is derived from a secret by HMAC is the same when a job is repeated, and nobody can compute it
without the secret. The seed of a recipe, which everybody knows, is no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path

from components.io import write_new

SECRET_BYTES = 32


def kept_secret(path: Path) -> bytes:
    """The secret of a file that its owner alone can read; the first call makes it."""
    while True:
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            write_new(path, secrets.token_bytes(SECRET_BYTES))
            continue
        if len(found) != SECRET_BYTES:
            raise ValueError(f"{path} has {len(found)} bytes, and a secret has {SECRET_BYTES}")
        return found


def simulated_secret(seed: int, client: str) -> bytes:
    """A secret that whoever knows the seed knows too."""
    return hashlib.sha256(f"simulated secret\x1f{seed}\x1f{client}".encode()).digest()


def digest(secret: bytes, *parts: str) -> bytes:
    """32 bytes that are a function of the secret and the parts, and look random without the secret."""
    message = b"".join(len(data).to_bytes(8, "big") + data for data in map(str.encode, parts))
    return hmac.digest(secret, message, hashlib.sha256)
