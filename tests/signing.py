"""Owns keys and signatures for tests: the real ssh-keygen, and bytes that it would never make; asserts nothing."""

from __future__ import annotations

import base64
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconciler.core.trust import NAMESPACE

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Key:
    """One key pair on disk."""

    private: Path

    @property
    def public(self) -> str:
        """Type and base64, as allowed_signers wants them."""
        return " ".join(self.private.with_suffix(".pub").read_text().split()[:2])

    @property
    def fingerprint(self) -> str:
        """`SHA256:…`."""
        command = ["ssh-keygen", "-lf", str(self.private.with_suffix(".pub"))]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()[1]

    def sign(self, data: bytes, *, namespace: str = NAMESPACE, options: tuple[str, ...] = ()) -> bytes:
        """Give the armor over `data`."""
        command = ["ssh-keygen", "-Y", "sign", "-f", str(self.private), "-n", namespace, *options]
        return subprocess.run(command, input=data, capture_output=True, check=True, timeout=10).stdout


def make_key(directory: Path, name: str, kind: str = "ed25519") -> Key:
    """Make a key pair without a passphrase."""
    path = directory / name
    command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", name, "-f", str(path)]
    subprocess.run(command, check=True, timeout=30)
    return Key(path)


def line(principal: str, key: Key, options: str = f'namespaces="{NAMESPACE}"') -> str:
    """Give one line of allowed_signers."""
    return f"{principal} {options} {key.public}\n"


def trust_directory(directory: Path, *lines: str, revoked: str = "") -> Path:
    """Write a trust directory."""
    directory.mkdir(exist_ok=True)
    (directory / "allowed_signers").write_text("".join(lines))
    (directory / "revoked").write_text(revoked)
    return directory


def armored(blob: bytes) -> bytes:
    """Wrap an SSHSIG blob as ssh-keygen would."""
    text = base64.b64encode(blob).decode()
    rows = "\n".join(text[start : start + 70] for start in range(0, len(text), 70))
    return f"-----BEGIN SSH SIGNATURE-----\n{rows}\n-----END SSH SIGNATURE-----\n".encode()


def string(data: bytes) -> bytes:
    """Give one string of RFC 4251, section 5."""
    return len(data).to_bytes(4) + data


def blob_of(armor: bytes) -> bytes:
    """Take the armor off."""
    return base64.b64decode(b"".join(armor.splitlines()[1:-1]))
