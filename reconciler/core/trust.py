"""Owns who may sign and what is revoked, read strictly from the trust files' bytes; verifies no signature."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reconciler.core.load import Problem
from reconciler.core.sshsig import Malformed, PublicKey, parse_key_text

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMESPACE = "governance.weaken@ringfence.v1"
"""The namespace of a signature is the permission that it uses."""

STATEMENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")
_OPTION = re.compile(r'([A-Za-z-]+)(?:="([^"]*)")?(?:,|\Z)')
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_TIME = re.compile(r"(\d{8})(\d{4}(?:\d{2})?)?Z", re.ASCII)
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_TEXT = re.compile(r"[\t\n\x20-\x7e\u00a1-\ud7ff\ue000-\ufefe]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """One line of allowed_signers. `not_before` and `not_after` bound when a signature may be first admitted."""

    principal: str
    key: PublicKey
    namespaces: tuple[str, ...]
    not_before: datetime | None
    not_after: datetime | None

    def __str__(self) -> str:
        window = f"{_shown(self.not_before)} to {_shown(self.not_after)}"
        return f"{self.principal} {self.key.fingerprint} {','.join(self.namespaces)} {window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Both trust files, without a flaw. `text` is allowed_signers as it was read."""

    signers: tuple[Signer, ...]
    revoked_keys: frozenset[str]
    revoked_ids: frozenset[str]
    text: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        """Digest of what was read, for caches."""
        whole = hashlib.sha256(self.text)
        for line in sorted({*self.revoked_keys, *(f"id {name}" for name in self.revoked_ids)}):
            whole.update(b"\n" + line.encode())
        return whole.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustBroken:
    """The trust files cannot be used: nobody's signature is admitted. Revocations that could be read still count."""

    problems: tuple[Problem, ...]
    revoked_keys: frozenset[str] = frozenset()
    revoked_ids: frozenset[str] = frozenset()


def read_trust_files(
    signers_file: str, signers: bytes | None, revoked_file: str, revoked: bytes | None
) -> Trust | TrustBroken:
    """Read both files' bytes (None: there is no such file); the two names are what problems call them."""
    problems: list[Problem] = []
    found: tuple[Signer, ...] = ()
    keys: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()
    if signers is None:
        problems.append(Problem(signers_file, 1, 1, "", "is missing: write it, one signer a line"))
    else:
        found = _signers(signers_file, signers, problems)
    if revoked is None:
        problems.append(Problem(revoked_file, 1, 1, "", "is missing: create it; an empty file revokes nothing"))
    else:
        keys, ids = _revoked(revoked_file, revoked, problems)
    if problems or signers is None:
        return TrustBroken(problems=tuple(sorted(problems)), revoked_keys=keys, revoked_ids=ids)
    return Trust(signers=found, revoked_keys=keys, revoked_ids=ids, text=signers)


def _lines(file: str, data: bytes, problems: list[Problem]) -> Iterator[tuple[int, str]]:
    """Give the lines that say something, with their numbers; text that an eye cannot check is a problem."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.append(Problem(file, data.count(b"\n", 0, error.start) + 1, 1, "", "is not UTF-8: save it as UTF-8"))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not _TEXT.fullmatch(line):
            message = "holds CRLF or invisible characters: write plain text with line feeds only"
            problems.append(Problem(file, number, 1, "", message))
        elif line.strip(" \t") and not line.lstrip(" \t").startswith("#"):
            yield number, line.strip(" \t")


def _signers(file: str, data: bytes, problems: list[Problem]) -> tuple[Signer, ...]:
    found: list[Signer] = []
    keys: dict[bytes, int] = {}
    spellings: dict[str, str] = {}
    for number, line in _lines(file, data, problems):
        signer = _signer(line)
        if isinstance(signer, Malformed):
            problems.append(Problem(file, number, 1, "", f"[{signer.code}] {signer.message}"))
            continue
        first = keys.setdefault(signer.key.blob, number)
        spelling = spellings.setdefault(signer.principal.lower(), signer.principal)
        if first != number:
            message = f"[duplicate_key] lists the key of line {first} again: one key belongs to one person, on one line"
            problems.append(Problem(file, number, 1, "", message))
        elif spelling != signer.principal:
            message = f"[principal] is spelled {spelling!r} on another line: spell one person's name one way"
            problems.append(Problem(file, number, 1, "", message))
        found.append(signer)
    return tuple(found)


def _signer(line: str) -> Signer | Malformed:
    """Read one line: `principal namespaces="…"[,valid-after="…Z"][,valid-before="…Z"] type base64 [comment]`."""
    principal, *fields = re.split(r"[ \t]+", line)
    if not PRINCIPAL.fullmatch(principal):
        return Malformed("principal", f"names {principal[:100]!r}: write one plain name, no pattern and no list")
    given: dict[str, str] | Malformed = {}
    if fields and ("=" in fields[0] or fields[0] == "cert-authority"):
        given = _options(fields.pop(0))
    if isinstance(given, Malformed):
        return given
    match fields:
        case [kind, text, *_comment]:
            key = parse_key_text(kind, text)
        case _:
            return Malformed("broken_line", f'is not `NAME namespaces="{NAMESPACE}" TYPE KEY`')
    if isinstance(key, Malformed):
        return key
    if "namespaces" not in given:
        return Malformed(
            "no_namespaces", f'has no namespaces=, so it would sign anything: add namespaces="{NAMESPACE}"'
        )
    namespaces = tuple(given["namespaces"].split(","))
    for namespace in namespaces:
        if not _NAMESPACE.fullmatch(namespace):
            return Malformed("namespaces", f"has the namespace {namespace[:100]!r}: name each one, without a pattern")
    not_before = _time(given.get("valid-after"))
    if isinstance(not_before, Malformed):
        return not_before
    not_after = _time(given.get("valid-before"))
    if isinstance(not_after, Malformed):
        return not_after
    return Signer(principal=principal, key=key, namespaces=namespaces, not_before=not_before, not_after=not_after)


def _options(text: str) -> dict[str, str] | Malformed:
    given: dict[str, str] = {}
    position = 0
    while position < len(text):
        found = _OPTION.match(text, position)
        name = found[1] if found else ""
        if name == "cert-authority":
            return Malformed("certificate", "makes a certificate authority a signer: list each signer's own key")
        if found is None or found[2] is None or name not in {"namespaces", "valid-after", "valid-before"}:
            return Malformed(
                "options", "has an option that is not namespaces, valid-after or valid-before, each quoted"
            )
        if name in given:
            return Malformed("options", f"says {name} twice: say it once")
        given[name] = found[2]
        position = found.end()
    return given if not text.endswith(",") else Malformed("options", "has a comma too many after its options")


def _time(text: str | None) -> datetime | Malformed | None:
    if text is None:
        return None
    wrong = Malformed(
        "local_time", f"has the time {text[:40]!r}: write YYYYMMDDHHMMSSZ; without the Z it would be local time"
    )
    found = _TIME.fullmatch(text)
    if found is None:
        return wrong
    clock = (found[2] or "0000").ljust(6, "0")
    try:
        return datetime.strptime(found[1] + clock, "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return wrong


def _revoked(file: str, data: bytes, problems: list[Problem]) -> tuple[frozenset[str], frozenset[str]]:
    keys: set[str] = set()
    ids: set[str] = set()
    for number, line in _lines(file, data, problems):
        kind, _, value = line.partition(" ")
        if kind == "key" and _FINGERPRINT.fullmatch(value):
            keys.add(value)
        elif kind == "id" and STATEMENT_ID.fullmatch(value):
            ids.add(value)
        else:
            message = (
                "[broken_line] is neither `key SHA256:FINGERPRINT` (as `ssh-keygen -lf` prints it) nor `id STATEMENT`"
            )
            problems.append(Problem(file, number, 1, "", message))
    return frozenset(keys), frozenset(ids)


def _shown(time: datetime | None) -> str:
    return "always" if time is None else time.strftime("%Y-%m-%dT%H:%M:%SZ")


def weakenings(before: Trust | None, after: Trust) -> tuple[str, ...]:
    """List what `after` lets pass that `before` did not: a key added, a window widened, a revocation taken back."""
    old = {} if before is None else {signer.key.blob: signer for signer in before.signers}
    found = []
    for signer in after.signers:
        was = old.get(signer.key.blob)
        if was is None:
            found.append(f"adds the signer {signer}")
            continue
        if was.principal != signer.principal:
            found.append(f"gives the key of {was.principal} to {signer.principal}")
        if not set(signer.namespaces) <= set(was.namespaces):
            found.append(f"widens the namespaces of {signer.principal}")
        earlier = was.not_before is not None and (signer.not_before is None or signer.not_before < was.not_before)
        later = was.not_after is not None and (signer.not_after is None or signer.not_after > was.not_after)
        if earlier or later:
            found.append(
                f"widens the window of {signer.principal} to {_shown(signer.not_before)} to {_shown(signer.not_after)}"
            )
    if before is not None:
        found += [f"takes back the revocation of key {key}" for key in sorted(before.revoked_keys - after.revoked_keys)]
        found += [f"takes back the revocation of id {name}" for name in sorted(before.revoked_ids - after.revoked_ids)]
    return tuple(found)
