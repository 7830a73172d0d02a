"""Owns which signed reasons of one snapshot count now, and which key was first seen when; decides no policy."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reconciler.core.grants import Approval, Grant
from reconciler.core.sshsig import Malformed
from reconciler.core.statement import NOT_LOOKED_AT, OTHER_HOST, ReasonRefused, Statement, Terms, judge, read
from reconciler.core.trust import Trust, TrustBroken
from reconciler.reason import choose_signer

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from reconciler.core.load import Problem, Tree
    from reconciler.reason import Verifier

_FOLDER = "reasons/"
MOST_SIGNATURES = 16
"""Signatures of one statement that are looked at: two approvals are the most that anything costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What is remembered of one good signature: these bytes, by this key, first seen then. Part of the state file."""

    sha256: str
    """Of the statement."""
    key: str
    signer: str
    admitted_at: datetime
    id: str
    ticket: str

    def to_json(self) -> dict[str, Tree]:
        """Give plain JSON; times to the microsecond, so that a signature is judged at the same moment for ever."""
        return {
            "sha256": self.sha256,
            "key": self.key,
            "signer": self.signer,
            "admitted_at": self.admitted_at.astimezone(UTC).isoformat(),
            "id": self.id,
            "ticket": self.ticket,
        }

    @classmethod
    def from_json(cls, value: Tree) -> Admission:
        """Read what `to_json` wrote. KeyError, TypeError or ValueError when it is something else."""
        return cls(
            sha256=str(value["sha256"]),
            key=str(value["key"]),
            signer=str(value["signer"]),
            admitted_at=datetime.fromisoformat(value["admitted_at"]).astimezone(UTC),
            id=str(value["id"]),
            ticket=str(value["ticket"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """One statement that counts now. `fresh` is False when a host without history would not admit it any more."""

    file: str
    statement: Statement
    approvals: tuple[Approval, ...]
    admissions: tuple[Admission, ...]
    grants: tuple[Grant, ...]
    """Its grants, with who signed them."""
    fresh: bool = True


@dataclass(frozen=True, slots=True, order=True)
class Refusal:
    """One statement or signature that does not count. `file` is relative to the policy directory."""

    file: str
    code: str
    message: str
    sha256: str = ""
    """Of the statement."""

    def __str__(self) -> str:
        return f"{self.file}: [{self.code}] {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admissions:
    """Every signed reason of one snapshot, judged."""

    admitted: tuple[Admitted, ...] = ()
    refused: tuple[Refusal, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Statements for other hosts, by file."""
    waiting: tuple[str, ...] = ()
    """Signatures that were not looked at yet, for want of time. They admit nothing meanwhile."""
    read: Mapping[str, Statement | tuple[Problem, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Every statement that somebody signed, by SHA-256, or what is wrong with it: for the next pass."""

    @property
    def grants(self) -> tuple[Grant, ...]:
        """The live grants."""
        return tuple(grant for one in self.admitted for grant in one.grants)


def statement_of(signature: str, statements: Container[str]) -> str | None:
    """Say which statement a signature belongs to: `CHG-1.alice.sig` to `CHG-1.yaml`, the longest name that fits."""
    stem = signature.removesuffix(".sig")
    # From the longest name down: to try each statement on each signature would be quadratic in what anybody commits.
    while "." in stem:
        stem = stem.rpartition(".")[0]
        if f"{stem}.yaml" in statements:
            return f"{stem}.yaml"
    return None


def admit(
    files: Mapping[str, bytes],
    trust: Trust | TrustBroken,
    before: Iterable[Admission],
    *,
    now: datetime,
    terms: Terms,
    verifier: Verifier,
    previous: Admissions | None = None,
) -> Admissions:
    """Judge every statement below `reasons/`. Blocks while ssh-keygen looks at signatures it has not seen.

    While the trust files are broken nothing new counts. What was admitted before does, unless its key or id is revoked
    by a line that can be read: a slip of the pen in a trust file must not stop every agent that depends on a reason.

    Args:
        files: a snapshot's files.
        trust: who may sign, and what is revoked.
        before: what was admitted in earlier passes.
        now: the time, never running backwards.
        terms: what this host asks of a statement.
        verifier: remembers signatures between passes.
        previous: what the pass before found; the statements that it read are not read again. It decides nothing.
    """
    verifier.begin()
    known = {(one.sha256, one.key): one for one in before}
    statements = sorted(file for file in files if file.startswith(_FOLDER) and file.endswith(".yaml"))
    signatures: dict[str, list[str]] = {file: [] for file in statements}
    refused: list[Refusal] = []
    for file in sorted(file for file in files if file.startswith(_FOLDER) and file.endswith(".sig")):
        statement = statement_of(file, signatures)
        if statement is None:
            refused.append(Refusal(file, "no_statement", "belongs to no statement: name it like one, or delete it"))
        else:
            signatures[statement].append(file)
    one_pass = _Pass(files, trust, known=known, now=now, terms=terms, verifier=verifier, previous=previous)
    digests = {file: hashlib.sha256(files[file]).hexdigest() for file in statements}
    in_force = {one.sha256 for one in known.values()}
    # Those that count already come first: whoever adds others by the thousand must not keep one of these from lapsing.
    judged = {
        file: one_pass.statement(file, digests[file], signatures[file])
        for file in sorted(statements, key=lambda file: (digests[file] not in in_force, file))
    }
    found = [judged[file] for file in statements]
    refused += one_pass.refused
    counts = Counter(one.statement.id for one in found if one is not None)
    admitted = []
    for one in found:
        if one is not None and counts[one.statement.id] > 1:
            message = f"has the id {one.statement.id} of another statement: neither counts; give it an id of its own"
            refused.append(Refusal(one.file, "duplicate_id", message, one.statement.sha256))
        elif one is not None:
            admitted.append(one)
    verifier.forget(
        frozenset(bytes.fromhex(digest) for digest in digests.values()),
        frozenset(hashlib.sha256(files[file]).digest() for signed in signatures.values() for file in signed),
    )
    return Admissions(
        admitted=tuple(admitted),
        refused=tuple(sorted(refused)),
        elsewhere=tuple(sorted(one_pass.elsewhere)),
        waiting=tuple(sorted(one_pass.waiting)),
        read=one_pass.read,
    )


class _Pass:
    """The arguments of one `admit`, and what it finds."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        trust: Trust | TrustBroken,
        *,
        known: Mapping[tuple[str, str], Admission],
        now: datetime,
        terms: Terms,
        verifier: Verifier,
        previous: Admissions | None,
    ) -> None:
        self._files = files
        self._trust = trust
        self._known = known
        self._now = now
        self._terms = terms
        self._verifier = verifier
        self._admitted = {one.statement.sha256: one for one in (previous.admitted if previous is not None else ())}
        self._before = previous.read if previous is not None else {}
        self.read: dict[str, Statement | tuple[Problem, ...]] = {}
        self.refused: list[Refusal] = []
        self.elsewhere: list[str] = []
        self.waiting: list[str] = []

    def statement(self, file: str, sha256: str, signatures: list[str]) -> Admitted | None:
        """Judge one statement: first its signatures, and only then what it says."""
        data = self._files[file]
        approvals: dict[Approval, datetime] = {}
        fresh = False
        if len(signatures) > MOST_SIGNATURES:
            many = f"is one of {len(signatures)} signatures of one statement, of which {MOST_SIGNATURES} are looked at"
            advice = "delete those that it does not need"
            self._refuse(signatures[-1], ReasonRefused("too_many_signatures", f"{many}: {advice}"), sha256)
        for number, signature in enumerate(signatures):
            look = number < MOST_SIGNATURES
            approval = self._signature(data, sha256, signature, look=look)
            if isinstance(approval, ReasonRefused):
                if approval.code != NOT_LOOKED_AT:
                    self._refuse(signature, approval, sha256)
                elif look:
                    self.waiting.append(signature)
                continue
            known = self._known.get((sha256, approval.key))
            approvals[approval] = self._now if known is None else known.admitted_at
            fresh = fresh or self._fresh(signature)
        if not approvals:
            if not signatures:
                message = "has no signature beside it: sign it (`ringfence reason sign`)"
                self._refuse(file, ReasonRefused("no_signature", message), sha256)
            return None
        before = self._admitted.get(sha256)
        statement = self.read[sha256] = self._before.get(sha256) or read(file, data)
        if isinstance(statement, tuple):
            for problem in statement:
                self._refuse(file, ReasonRefused("bad_statement", f"{problem}: mend it and sign it again"), sha256)
            return None
        first = min(approvals.values())
        verdict = judge(
            statement,
            self._terms,
            now=self._now.timestamp(),
            admitted_at=first.timestamp(),
            revoked=self._trust.revoked_ids,
        )
        if verdict is not None and verdict.code == OTHER_HOST:
            self.elsewhere.append(file)
            return None
        if verdict is not None:
            self._refuse(file, verdict, sha256)
            return None
        signed = tuple(sorted(approvals))
        return Admitted(
            file=file,
            statement=statement,
            approvals=signed,
            # The very objects of the pass before, which its outcome is indexed by.
            grants=before.grants if before is not None and before.approvals == signed else statement.approved(signed),
            admissions=tuple(
                Admission(
                    sha256=sha256,
                    key=approval.key,
                    signer=approval.signer,
                    admitted_at=time,
                    id=statement.id,
                    ticket=statement.ticket,
                )
                for approval, time in sorted(approvals.items())
            ),
            fresh=fresh,
        )

    def _signature(self, data: bytes, sha256: str, file: str, *, look: bool) -> Approval | ReasonRefused:
        """Say who approved with one signature file, judged at the time of its first admission.

        Without `look` it only counts when it was looked at before, or its key signed these bytes before.
        """
        parsed = self._verifier.parsed(self._files[file])
        known = None if isinstance(parsed, Malformed) else self._known.get((sha256, parsed.key.fingerprint))
        if isinstance(self._trust, TrustBroken):
            if known is None:
                return ReasonRefused("trust_broken", f"cannot be verified: {self._trust.problems[0]}")
            if known.key in self._trust.revoked_keys:
                return ReasonRefused("key_revoked", f"is signed with the revoked key {known.key}")
            return Approval(known.signer, known.key)
        at = self._now if known is None else known.admitted_at
        found = self._verifier.verify(data, self._files[file], self._trust, at=at, look=look)
        if not isinstance(found, ReasonRefused):
            return Approval(found.principal, found.key)
        if found.transient and known is not None:
            # Its key is a signer's and is not revoked: that was decided before ssh-keygen was asked.
            return Approval(known.signer, known.key)
        return found

    def _fresh(self, file: str) -> bool:
        """Say whether a host without history would take this signature now."""
        parsed = self._verifier.parsed(self._files[file])
        if isinstance(parsed, Malformed) or isinstance(self._trust, TrustBroken):
            return False
        return not isinstance(choose_signer(parsed, self._trust, at=self._now), ReasonRefused)

    def _refuse(self, file: str, why: ReasonRefused, sha256: str) -> None:
        self.refused.append(Refusal(file, why.code, why.message, sha256))
