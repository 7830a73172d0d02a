"""Owns the way through ssh-keygen: who signed which bytes, and when that was first seen; does not read a statement."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reconciler.core.load import Problem
from reconciler.core.sshsig import Malformed, Signature, parse_signature
from reconciler.core.statement import MAX_BYTES as MAX_STATEMENT
from reconciler.core.statement import NOT_LOOKED_AT, ReasonRefused
from reconciler.core.trust import NAMESPACE, Signer, Trust, TrustBroken, read_trust_files
from reconciler.durable import write_all
from reconciler.snapshot import TRUST, Bounds, NotSettled, take

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SSH_KEYGEN = "/usr/bin/ssh-keygen"
MAX_SIGNATURE = 8 * 1024
MAX_TRUST_FILE = 1024 * 1024
TIMEOUT = 5.0
"""Seconds for one verification. ssh-keygen is quadratic in the size of garbage, so sizes are bounded as well."""
BUDGET = 1.0
"""Seconds that one pass of a daemon may spend on signatures that it has not seen: each costs some 10 ms."""

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
_GOOD = re.compile(r'Good "(?P<namespace>[^"]*)" signature for (?P<principal>\S+) with \S+ key (?P<key>SHA256:\S+)\n')
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class Signed:
    """These bytes were signed by this principal's key, in our namespace, and the signer was good at the time asked."""

    principal: str
    key: str
    """Fingerprint, `SHA256:…`."""


def read_trust(directory: Path, *, owner: str = "root", deadline: float = 5.0) -> Trust | TrustBroken:
    """Read the trust directory: allowed_signers and revoked, at rest, owned by `owner` or root alone. Blocks."""
    bounds = Bounds(files=len(TRUST.files), bytes=MAX_TRUST_FILE)
    snapshot = take(directory, owner=owner, bounds=bounds, deadline=deadline, layout=TRUST)
    if isinstance(snapshot, NotSettled):
        return TrustBroken(problems=(Problem(str(directory), 1, 1, "", f"[{snapshot.code}] {snapshot.message}"),))
    signers, revoked = str(directory / "allowed_signers"), str(directory / "revoked")
    files = snapshot.files
    trust = read_trust_files(signers, files.get("allowed_signers"), revoked, files.get("revoked"))
    if snapshot.refused:
        refused = tuple(
            Problem(str(directory / one.file), 1, 1, "", f"[{one.code}] {one.message}") for one in snapshot.refused
        )
        return TrustBroken(problems=refused, revoked_keys=trust.revoked_keys, revoked_ids=trust.revoked_ids)
    return trust


def choose_signer(signature: Signature, trust: Trust, *, at: datetime) -> Signer | ReasonRefused:
    """Find the one line of allowed_signers that this signature's key is on, and check that it may sign at `at`.

    `ssh-keygen -Y find-principals` is not asked: it ignores namespaces and windows, and verifies nothing.
    """
    if signature.namespace != NAMESPACE:
        return ReasonRefused("wrong_namespace", f"is signed for {signature.namespace[:60]!r}: sign with -n {NAMESPACE}")
    signer = next((one for one in trust.signers if one.key == signature.key), None)
    return permitted(signature.key.fingerprint, signer, trust, at=at)


def permitted(key: str, signer: Signer | None, trust: Trust, *, at: datetime) -> Signer | ReasonRefused:
    """Check that the key of this fingerprint may sign at `at`; `signer` is its one line of allowed_signers, if any."""
    if key in trust.revoked_keys:
        return ReasonRefused("key_revoked", f"is signed with the revoked key {key}: another signer has to sign")
    if signer is None:
        return ReasonRefused(
            "unknown_key",
            f"is signed with key {key}, which is no signer's: sign with a signer's key; only if this key shall be a "
            "signer's from now on, add its line to allowed_signers",
        )
    if NAMESPACE not in signer.namespaces:
        return ReasonRefused(
            "not_permitted", f"is signed by {signer.principal}, whose line in allowed_signers lacks {NAMESPACE}"
        )
    if signer.not_before is not None and at < signer.not_before:
        return ReasonRefused("signer_not_yet_valid", f"is signed by {signer.principal}, who may sign only later")
    if signer.not_after is not None and at >= signer.not_after:
        return ReasonRefused(
            "signer_expired", f"is signed by {signer.principal}, whose time as a signer is over: another has to sign"
        )
    return signer


class Verifier:
    """Verifies signatures, and remembers by digest what ssh-keygen said, so that a pass over old ones costs nothing.

    Only ssh-keygen's word on the bytes is remembered. Who may sign, when, and what is revoked is decided every time.
    After `budget` seconds of one pass no further signature is looked at: the next pass goes on where this one stopped.
    """

    def __init__(
        self,
        program: str = SSH_KEYGEN,
        timeout: float = TIMEOUT,
        *,
        budget: float = BUDGET,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._timeout = timeout
        self._budget = budget
        self._clock = clock
        self._until = clock() + budget
        self._known: dict[tuple[bytes, bytes, Signer], Signed | ReasonRefused] = {}
        self._parsed: dict[bytes, Signature | Malformed] = {}

    def begin(self) -> None:
        """Begin a pass: its time counts from here."""
        self._until = self._clock() + self._budget

    def knowing(self) -> Verifier:
        """Give one that knows what this one knows, and looks at nothing new. It may be used beside this one."""
        made = Verifier(self._program, self._timeout, budget=0, clock=self._clock)
        made._known, made._parsed = self._known.copy(), self._parsed.copy()
        return made

    def parsed(self, signature: bytes) -> Signature | Malformed:
        """Give what the bytes of a signature file say of themselves."""
        if len(signature) > MAX_SIGNATURE:
            return Malformed("signature_too_large", f"is larger than {MAX_SIGNATURE} bytes: sign again")
        digest = hashlib.sha256(signature).digest()
        found = self._parsed.get(digest)
        if found is None:
            found = self._parsed[digest] = parse_signature(signature)
        return found

    def verify(
        self, statement: bytes, signature: bytes, trust: Trust, *, at: datetime, look: bool = True
    ) -> Signed | ReasonRefused:
        """Say who signed `statement`, judged at the time `at`: when it is first admitted, and for ever after the same.

        Blocks for at most the timeout; without `look`, and when the budget is spent, only says what is known.
        """
        if len(statement) > MAX_STATEMENT:
            return ReasonRefused("statement_too_large", f"is larger than {MAX_STATEMENT} bytes: split it")
        if b"\r" in statement:
            advice = "keep git from converting it (`reasons/* -text` in .gitattributes), then sign again"
            return ReasonRefused("crlf", f"holds carriage returns: {advice}")
        parsed = self.parsed(signature)
        if isinstance(parsed, Malformed):
            return ReasonRefused(parsed.code, f"has a signature that {parsed.message}")
        signer = choose_signer(parsed, trust, at=at)
        if isinstance(signer, ReasonRefused):
            return signer
        place = (hashlib.sha256(statement).digest(), hashlib.sha256(signature).digest(), signer)
        known = self._known.get(place)
        if known is None:
            if not look or self._clock() >= self._until:
                return ReasonRefused(NOT_LOOKED_AT, "was not looked at yet, for there are many: the next pass goes on")
            known = self._ask(statement, signature, signer, at)
            if isinstance(known, ReasonRefused) and known.transient:
                return known
            self._known[place] = known
        return known

    def forget(self, statements: frozenset[bytes], signatures: frozenset[bytes]) -> None:
        """Drop what is remembered of all but these, each a SHA-256."""
        kept = {place: word for place, word in self._known.items() if place[0] in statements and place[1] in signatures}
        self._known = kept
        self._parsed = {digest: found for digest, found in self._parsed.items() if digest in signatures}

    def _ask(self, statement: bytes, signature: bytes, signer: Signer, at: datetime) -> Signed | ReasonRefused:
        """Run `ssh-keygen -Y verify` over sealed memory: what was checked before is what it reads."""
        with ExitStack() as stack:
            message, armor, line = (
                _sealed(stack, name, data)
                for name, data in (("statement", statement), ("signature", signature), ("signer", _line(signer)))
            )
            command = [
                *(self._program, "-Y", "verify", "-n", NAMESPACE, "-I", signer.principal),
                *("-f", f"/proc/self/fd/{line}", "-s", f"/proc/self/fd/{armor}"),
                *("-O", f"verify-time={at.astimezone(UTC):%Y%m%d%H%M%S}Z"),
            ]
            try:
                done = subprocess.run(
                    command,
                    stdin=message,
                    capture_output=True,
                    env=_ENVIRONMENT,
                    cwd="/",
                    pass_fds=(armor, line),
                    timeout=self._timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return ReasonRefused("timeout", f"could not be verified in {self._timeout:g} s: it is tried again")
            except OSError as error:
                return ReasonRefused(
                    "verifier_missing",
                    f"could not be verified: {self._program}: {error.strerror}: install openssh-client",
                )
        good = _GOOD.fullmatch(done.stdout.decode("ascii", "backslashreplace"))
        if done.returncode == 0 and good is not None:
            expected = {"namespace": NAMESPACE, "principal": signer.principal, "key": signer.key.fingerprint}
            if good.groupdict() == expected:
                return Signed(signer.principal, signer.key.fingerprint)
        if done.returncode < 0:
            return ReasonRefused(
                "verifier_failed", f"could not be verified: ssh-keygen died of signal {-done.returncode}"
            )
        return ReasonRefused(
            "bad_signature",
            f"was changed after {signer.principal} signed it, or the signature is another file's: sign again",
        )


def _line(signer: Signer) -> bytes:
    """Give the signer's line as we understood it, so that nothing in the file can mean something else to ssh-keygen.

    Its window is left out: it was checked, at the time of the first admission, by `choose_signer`.
    """
    return f'{signer.principal} namespaces="{NAMESPACE}" {signer.key}\n'.encode()


def _sealed(stack: ExitStack, name: str, data: bytes) -> int:
    """Put `data` into memory that nobody can change any more; give a descriptor at its start."""
    descriptor = os.memfd_create(f"ringfence-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    write_all(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def sign(
    statement: Path,
    key: Path,
    out: Path,
    *,
    accept: Callable[[Signature], ReasonRefused | None] = lambda _: None,
    program: str = SSH_KEYGEN,
    timeout: float = 120.0,
) -> ReasonRefused | None:
    """Sign the statement with `key` (a private key, or a public one whose private half an agent holds) into `out`.

    Always over standard input and output: `-Y sign FILE` beside an existing .sig and without a terminal writes nothing
    and exits 0. The caller's environment stays, for its agent and its passphrase prompt; `timeout` is for the touch of
    a security key. None: it is signed. An existing `out` is replaced, and only by a signature that `accept` takes.
    """
    try:
        data = statement.read_bytes()
    except OSError as error:
        return ReasonRefused("unreadable", f"cannot be read: {error.strerror}")
    if len(data) > MAX_STATEMENT or b"\r" in data:
        return ReasonRefused(
            "bad_statement", f"holds carriage returns or more than {MAX_STATEMENT} bytes: mend it first"
        )
    try:
        done = subprocess.run(
            [program, "-Y", "sign", "-f", str(key), "-n", NAMESPACE],
            input=data,
            stdout=subprocess.PIPE,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ReasonRefused("timeout", f"was not signed in {timeout:g} s")
    except OSError as error:
        return ReasonRefused("signer_missing", f"cannot be signed: {program}: {error.strerror}: install openssh-client")
    made = parse_signature(done.stdout)
    if done.returncode != 0 or isinstance(made, Malformed):
        why = made.message if isinstance(made, Malformed) and done.returncode == 0 else "see what ssh-keygen says above"
        return ReasonRefused("not_signed", f"was not signed with {key}: {why}")
    refused = accept(made)
    if refused is not None:
        return refused
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        temporary.write_bytes(done.stdout)
        temporary.replace(out)
    except OSError as error:
        return ReasonRefused("unwritable", f"was not signed: {out}: cannot be written: {error.strerror}")
    return None
