"""Owns the bytes of OpenSSH public keys and SSHSIG signatures, read strictly; verifies no signature."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

_BEGIN = b"-----BEGIN SSH SIGNATURE-----\n"
_END = b"-----END SSH SIGNATURE-----"
_MAGIC = b"SSHSIG"
_CERTIFICATE = "-cert-v0"
_USER_PRESENT = 0x01
_ED25519_BYTES = 32
_P256_POINT = (65, b"\x04")  # length and first byte of an uncompressed point (SEC 1, 2.3.3)


class KeyType(StrEnum):
    """The keys that may sign: no RSA (its signatures are malleable in their hash), no DSA, no certificates."""

    ED25519 = "ssh-ed25519"
    ECDSA_P256 = "ecdsa-sha2-nistp256"
    SK_ED25519 = "sk-ssh-ed25519@openssh.com"
    SK_ECDSA_P256 = "sk-ecdsa-sha2-nistp256@openssh.com"


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are not what they should be; the message says what mends it."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class PublicKey:
    """One public key."""

    type: KeyType
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """`SHA256:` and unpadded base64, as ssh-keygen prints it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode("ascii").rstrip("=")

    def __str__(self) -> str:
        return f"{self.type} {base64.b64encode(self.blob).decode('ascii')}"


@dataclass(frozen=True, slots=True)
class Signature:
    """What an SSHSIG blob says of itself; whether it is true is for ssh-keygen."""

    key: PublicKey
    namespace: str


class _Short(Exception):  # noqa: N818 - private control flow of one parser: it never leaves this module
    """The bytes end too early, or go on too long."""


class _Reader:
    """RFC 4251 section 5: uint32 lengths and strings."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def take(self, count: int) -> bytes:
        if len(self._data) - self._position < count:
            raise _Short
        self._position += count
        return self._data[self._position - count : self._position]

    def number(self) -> int:
        return int.from_bytes(self.take(4))

    def string(self) -> bytes:
        return self.take(self.number())

    def end(self) -> None:
        if self._position != len(self._data):
            raise _Short


def parse_key(blob: bytes) -> PublicKey | Malformed:
    """Read a public key's blob (RFC 8709, RFC 5656, OpenSSH PROTOCOL.u2f); nothing may follow it."""
    try:
        return _key(blob)
    except _Short:
        return Malformed("bad_key", "is not a whole public key: copy the line of the .pub file again")


def parse_key_text(kind: str, text: str) -> PublicKey | Malformed:
    """Read the two fields of a .pub file: type and base64."""
    if _CERTIFICATE in kind:
        return Malformed("certificate", "is a certificate: list the signer's own public key instead")
    if kind not in set(KeyType):
        return Malformed("key_type", f"has a key of type {kind[:40]!r}: use one of {', '.join(KeyType)}")
    blob = _base64(text.encode())
    if blob is None:
        return Malformed("bad_key", "is not a whole public key: copy the line of the .pub file again")
    key = parse_key(blob)
    if isinstance(key, PublicKey) and key.type != kind:
        return Malformed("bad_key", f"says {kind} and holds a key of type {key.type}: copy the .pub file's line again")
    return key


def _key(blob: bytes) -> PublicKey | Malformed:
    reader = _Reader(blob)
    name = reader.string().decode("ascii", "backslashreplace")
    if _CERTIFICATE in name:
        return Malformed("certificate", "is made with a certificate: sign with the plain key")
    if name not in set(KeyType):
        return Malformed("key_type", f"uses a key of type {name[:40]!r}: use one of {', '.join(KeyType)}")
    kind = KeyType(name)
    match kind:
        case KeyType.ED25519 | KeyType.SK_ED25519:
            whole = len(reader.string()) == _ED25519_BYTES
        case KeyType.ECDSA_P256 | KeyType.SK_ECDSA_P256:
            curve, point = reader.string(), reader.string()
            whole = curve == b"nistp256" and (len(point), point[:1]) == _P256_POINT
        case _:
            assert_never(kind)
    if kind in {KeyType.SK_ED25519, KeyType.SK_ECDSA_P256}:
        whole = reader.string().startswith(b"ssh:") and whole
    reader.end()
    return PublicKey(kind, blob) if whole else Malformed("bad_key", "is not a whole public key: copy it again")


def parse_signature(data: bytes) -> Signature | Malformed:
    """Read a .sig file: exactly one armor, one SSHSIG blob in it (OpenSSH PROTOCOL.sshsig), and nothing after either.

    ssh-keygen itself ignores what follows the first armor, and accepts sk- signatures that nobody touched.
    """
    if data.startswith(_BEGIN.strip() + b"\r\n"):
        return Malformed(
            "crlf", "has CRLF line ends: keep git from converting it (`reasons/* -text` in .gitattributes)"
        )
    if not data.startswith(_BEGIN):
        return Malformed("not_a_signature", "is not an SSH signature: sign again (`ringfence reason sign`)")
    body, found, rest = data.removeprefix(_BEGIN).partition(b"\n" + _END)
    if not found:
        return Malformed("not_a_signature", "ends before its END line: sign again (`ringfence reason sign`)")
    if _BEGIN.strip() in rest:
        return Malformed("second_signature", "holds a second signature: write one file for each signer")
    if rest not in {b"", b"\n"}:
        return Malformed("trailing_bytes", "has bytes after its END line: sign again (`ringfence reason sign`)")
    blob = _base64(body.replace(b"\n", b""))
    if blob is None:
        return Malformed("not_a_signature", "is not base64 inside: sign again (`ringfence reason sign`)")
    try:
        return _signature(blob)
    except _Short:
        return Malformed("malformed_signature", "is cut off or has bytes too many inside: sign again")


def _signature(blob: bytes) -> Signature | Malformed:
    reader = _Reader(blob)
    if reader.take(len(_MAGIC)) != _MAGIC or reader.number() != 1:
        return Malformed("malformed_signature", "is not an SSHSIG of version 1: sign with ssh-keygen -Y sign")
    key = _key(reader.string())
    if isinstance(key, Malformed):
        return key
    namespace, reserved, algorithm = reader.string(), reader.string(), reader.string()
    inner = _Reader(reader.string())
    reader.end()
    if reserved:
        return Malformed("malformed_signature", "uses a reserved field: sign with ssh-keygen -Y sign")
    if algorithm != b"sha512":
        return Malformed("hash_algorithm", "does not use sha512: sign again without -O hashalg")
    if inner.string() != key.type.encode():
        return Malformed("malformed_signature", "is of another kind than its key: sign with ssh-keygen -Y sign")
    inner.string()
    if key.type in {KeyType.SK_ED25519, KeyType.SK_ECDSA_P256}:
        flags, _counter = inner.take(1)[0], inner.number()
        if not flags & _USER_PRESENT:
            return Malformed("not_touched", "was made without touching the security key: sign again and touch it")
    inner.end()
    return Signature(key, namespace.decode("ascii", "backslashreplace"))


def _base64(text: bytes) -> bytes | None:
    """Decode base64 that is spelled the one canonical way."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
    return data if base64.b64encode(data) == text else None
