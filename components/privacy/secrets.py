"""Secrets of clients: 32 bytes each from the system's entropy, from which noise is derived.

Noise that is derived from a secret by HMAC is the same when a job is repeated, and nobody can compute it
without the secret. The seed of a recipe, which everybody knows, is no secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

SECRET_BYTES = 32


def kept_secret(path: Path) -> bytes:
    """The secret of a file that its owner alone can read; the first call makes it."""
    while True:
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            _write_new(path, secrets.token_bytes(SECRET_BYTES))
            continue
        if len(found) != SECRET_BYTES:
            raise ValueError(f"{path} has {len(found)} bytes, and a secret has {SECRET_BYTES}")
        return found


def _write_new(path: Path, secret: bytes) -> None:
    """Write a file, which appears complete, unless it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was faster
            try:
                os.link(name, path)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                with path.open("xb") as file:
                    path.chmod(0o600)
                    file.write(secret)
    finally:
        os.unlink(name)


def simulated_secret(seed: int, client: str) -> bytes:
    """A secret that whoever knows the seed knows too."""
    return hashlib.sha256(f"simulated secret\x1f{seed}\x1f{client}".encode()).digest()


def digest(secret: bytes, *parts: str) -> bytes:
    """32 bytes that are a function of the secret and the parts, and look random without the secret."""
    message = b"".join(len(data).to_bytes(8, "big") + data for data in map(str.encode, parts))
    return hmac.digest(secret, message, hashlib.sha256)
