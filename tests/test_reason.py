"""Signatures that cannot be fooled: the real ssh-keygen with real keys, and everything that it alone would let pass."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from reconciler.core.sshsig import KeyType, Malformed, parse_signature
from reconciler.core.statement import MAX_BYTES, ReasonRefused
from reconciler.core.trust import NAMESPACE, Trust, TrustBroken, weakenings
from reconciler.reason import Signed, Verifier, read_trust, sign
from tests.signing import Key, armored, blob_of, line, make_key, string, trust_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NOW = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
OPENSSL = "/usr/bin/openssl"
STATEMENT = b"version: 1\nkind: signed-reason\nid: CHG-1.1\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Key]:
    directory = tmp_path_factory.mktemp("keys")
    made = {name: make_key(directory, name) for name in ("alice", "bob", "mallory")}
    made["carol"] = make_key(directory, "carol", "ecdsa")
    made["rsa"] = make_key(directory, "rsa", "rsa")
    return made


@pytest.fixture
def trust(keys: dict[str, Key], tmp_path: Path) -> Trust:
    return trusted(trust_directory(tmp_path / "trust", line("alice", keys["alice"]), line("carol", keys["carol"])))


def trusted(directory: Path) -> Trust:
    found = read_trust(directory)
    assert isinstance(found, Trust), found
    return found


def verify(statement: bytes, signature: bytes, trust: Trust, at: datetime = NOW) -> Signed | ReasonRefused:
    return Verifier().verify(statement, signature, trust, at=at)


def refused(found: Signed | ReasonRefused) -> str:
    assert isinstance(found, ReasonRefused), found
    assert found.message
    return found.code


# What counts


@pytest.mark.parametrize("who", ["alice", "carol"])
def test_a_signer_in_the_right_namespace_is_admitted_by_name_and_key(
    who: str, keys: dict[str, Key], trust: Trust
) -> None:
    found = verify(STATEMENT, keys[who].sign(STATEMENT), trust)
    assert found == Signed(who, keys[who].fingerprint)


def test_our_own_sign_makes_what_our_own_verify_takes(keys: dict[str, Key], trust: Trust, tmp_path: Path) -> None:
    """Beside an existing .sig too, where `ssh-keygen -Y sign FILE` without a terminal writes nothing and exits 0."""
    statement, out = tmp_path / "CHG-1.yaml", tmp_path / "CHG-1.alice.sig"
    statement.write_bytes(STATEMENT)
    out.write_bytes(b"old")
    assert sign(statement, keys["alice"].private, out) is None
    assert isinstance(verify(STATEMENT, out.read_bytes(), trust), Signed)
    assert not list(tmp_path.glob(".*"))


def test_a_key_that_cannot_sign_leaves_the_old_signature(tmp_path: Path) -> None:
    statement, out = tmp_path / "CHG-1.yaml", tmp_path / "CHG-1.alice.sig"
    statement.write_bytes(STATEMENT)
    out.write_bytes(b"old")
    found = sign(statement, tmp_path / "no-such-key", out)
    assert isinstance(found, ReasonRefused)
    assert found.code == "not_signed"
    assert out.read_bytes() == b"old"


# What does not: the signature


def _altered(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT + b"# more\n", key.sign(STATEMENT)


def _other_namespace(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, key.sign(STATEMENT, namespace="file")


def _similar_namespace(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, key.sign(STATEMENT, namespace=NAMESPACE + "0")


def _crlf_statement(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT.replace(b"\n", b"\r\n"), key.sign(STATEMENT)


def _crlf_signed(key: Key) -> tuple[bytes, bytes]:
    statement = STATEMENT.replace(b"\n", b"\r\n")
    return statement, key.sign(statement)


def _crlf_signature(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, key.sign(STATEMENT).replace(b"\n", b"\r\n")


def _second_armor(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, key.sign(STATEMENT) * 2


def _trailing_bytes(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, key.sign(STATEMENT) + b"and more\n"


def _leading_bytes(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, b"\n" + key.sign(STATEMENT)


def _garbage(_: Key) -> tuple[bytes, bytes]:
    return STATEMENT, os.urandom(2000)


def _empty(_: Key) -> tuple[bytes, bytes]:
    return STATEMENT, b""


def _huge(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, key.sign(STATEMENT).replace(b"-----END", b"A" * 100_000_000 + b"\n-----END")


def _huge_statement(_: Key) -> tuple[bytes, bytes]:
    return b"#" * (MAX_BYTES + 1), b""


def _bytes_inside(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, armored(blob_of(key.sign(STATEMENT)) + b"\0")


def _cut_inside(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, armored(blob_of(key.sign(STATEMENT))[:-1])


def _sha256(key: Key) -> tuple[bytes, bytes]:
    return STATEMENT, key.sign(STATEMENT, options=("-O", "hashalg=sha256"))


def _reserved(key: Key) -> tuple[bytes, bytes]:
    blob = blob_of(key.sign(STATEMENT))
    place = blob.index(NAMESPACE.encode()) + len(NAMESPACE)
    return STATEMENT, armored(blob[:place] + string(b"x") + blob[place + 4 :])


def _bits_changed(key: Key) -> tuple[bytes, bytes]:
    blob = bytearray(blob_of(key.sign(STATEMENT)))
    blob[-1] ^= 1
    return STATEMENT, armored(bytes(blob))


@pytest.mark.parametrize(
    ("make", "code"),
    [
        pytest.param(_altered, "bad_signature", id="the statement was altered after it was signed"),
        pytest.param(_bits_changed, "bad_signature", id="a bit of the signature was changed"),
        pytest.param(_other_namespace, "wrong_namespace", id="it was signed for something else"),
        pytest.param(_similar_namespace, "wrong_namespace", id="it was signed for a longer namespace"),
        pytest.param(_crlf_statement, "crlf", id="git gave the statement CRLF"),
        pytest.param(_crlf_signed, "crlf", id="a statement with CRLF was signed"),
        pytest.param(_crlf_signature, "crlf", id="git gave the signature CRLF"),
        pytest.param(_second_armor, "second_signature", id="a second armor follows the first"),
        pytest.param(_trailing_bytes, "trailing_bytes", id="bytes follow the armor"),
        pytest.param(_leading_bytes, "not_a_signature", id="a byte precedes the armor"),
        pytest.param(_garbage, "not_a_signature", id="it is garbage"),
        pytest.param(_empty, "not_a_signature", id="it is empty"),
        pytest.param(_huge, "signature_too_large", id="it is 100 MB of garbage in an armor"),
        pytest.param(_huge_statement, "statement_too_large", id="the statement is too large"),
        pytest.param(_bytes_inside, "malformed_signature", id="a byte too many is inside"),
        pytest.param(_cut_inside, "malformed_signature", id="a byte is missing inside"),
        pytest.param(_sha256, "hash_algorithm", id="it uses another hash"),
        pytest.param(_reserved, "malformed_signature", id="a reserved field is used"),
    ],
)
def test_a_signature_that_is_not_one_good_one_is_refused(
    make: Callable[[Key], tuple[bytes, bytes]], code: str, keys: dict[str, Key], trust: Trust
) -> None:
    statement, signature = make(keys["alice"])
    started = time.monotonic()
    assert refused(verify(statement, signature, trust)) == code
    assert time.monotonic() - started < 5


def test_a_key_that_is_no_signers_is_refused(keys: dict[str, Key], trust: Trust) -> None:
    assert refused(verify(STATEMENT, keys["mallory"].sign(STATEMENT), trust)) == "unknown_key"


def test_an_rsa_key_is_refused(keys: dict[str, Key], trust: Trust) -> None:
    assert refused(verify(STATEMENT, keys["rsa"].sign(STATEMENT), trust)) == "key_type"


def test_a_certificate_is_refused_though_ssh_keygen_signs_with_it(keys: dict[str, Key], tmp_path: Path) -> None:
    agent = tmp_path / "certified"
    agent.write_bytes(keys["alice"].private.read_bytes())
    agent.chmod(0o600)
    agent.with_suffix(".pub").write_text(keys["alice"].public + "\n")
    command = ["ssh-keygen", "-q", "-s", str(keys["mallory"].private), "-I", "x", "-n", "alice", f"{agent}.pub"]
    subprocess.run(command, check=True, timeout=10)
    blob = (tmp_path / "certified-cert.pub").read_text().split()[1]
    whole = b"SSHSIG" + (1).to_bytes(4) + string(base64.b64decode(blob))
    found = parse_signature(armored(whole))
    assert isinstance(found, Malformed)
    assert found.code == "certificate"


@pytest.mark.parametrize(("flags", "code"), [(0x01, None), (0x05, None), (0x00, "not_touched"), (0x04, "not_touched")])
@pytest.mark.parametrize("kind", [KeyType.SK_ED25519, KeyType.SK_ECDSA_P256])
def test_a_security_key_that_nobody_touched_is_refused(kind: KeyType, flags: int, code: str | None) -> None:
    point = string(b"\1" * 32) if kind is KeyType.SK_ED25519 else string(b"nistp256") + string(b"\4" + b"\1" * 64)
    key = string(kind.encode()) + point + string(b"ssh:")
    inner = string(kind.encode()) + string(b"\2" * 64) + bytes([flags]) + (7).to_bytes(4)
    blob = b"SSHSIG" + (1).to_bytes(4) + string(key) + string(NAMESPACE.encode()) + string(b"") + string(b"sha512")
    found = parse_signature(armored(blob + string(inner)))
    assert (found.code if isinstance(found, Malformed) else None) == code


# What does not: the signer


@pytest.fixture
def foreign_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Pacific/Kiritimati")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("foreign_zone")
@pytest.mark.parametrize(
    ("options", "offset", "code"),
    [
        pytest.param(',valid-before="20260601120000Z"', -1, None, id="a second before the end"),
        pytest.param(',valid-before="20260601120000Z"', 0, "signer_expired", id="at the end"),
        pytest.param(',valid-before="202606011200Z"', 1, "signer_expired", id="after the end"),
        pytest.param(',valid-after="20260601120000Z"', 0, None, id="at the beginning"),
        pytest.param(',valid-after="20260601120000Z"', -1, "signer_not_yet_valid", id="before the beginning"),
        pytest.param(',valid-before="20260602Z"', 0, None, id="a day without a time"),
    ],
)
def test_a_signers_window_is_utc_and_exact(
    options: str, offset: int, code: str | None, keys: dict[str, Key], tmp_path: Path
) -> None:
    directory = trust_directory(tmp_path / "trust", line("alice", keys["alice"], f'namespaces="{NAMESPACE}"{options}'))
    found = verify(STATEMENT, keys["alice"].sign(STATEMENT), trusted(directory), NOW + timedelta(seconds=offset))
    assert (found.code if isinstance(found, ReasonRefused) else None) == code


def test_a_leaver_whose_time_is_over_still_counts_at_the_time_of_the_first_admission(
    keys: dict[str, Key], tmp_path: Path
) -> None:
    options = f'namespaces="{NAMESPACE}",valid-before="20260601Z"'
    trust = trusted(trust_directory(tmp_path / "trust", line("alice", keys["alice"], options)))
    signature = keys["alice"].sign(STATEMENT)
    verifier = Verifier()
    assert isinstance(verifier.verify(STATEMENT, signature, trust, at=NOW - timedelta(days=30)), Signed)
    assert refused(verifier.verify(STATEMENT, signature, trust, at=NOW)) == "signer_expired"
    assert isinstance(verifier.verify(STATEMENT, signature, trust, at=NOW - timedelta(days=30)), Signed)


def test_a_revoked_key_counts_no_more_whenever_it_signed(keys: dict[str, Key], tmp_path: Path) -> None:
    revoked = f"# left in spring\nkey {keys['alice'].fingerprint}\n"
    trust = trusted(trust_directory(tmp_path / "trust", line("alice", keys["alice"]), revoked=revoked))
    assert refused(verify(STATEMENT, keys["alice"].sign(STATEMENT), trust)) == "key_revoked"


def test_what_was_verified_once_is_judged_again_when_the_signers_change(keys: dict[str, Key], tmp_path: Path) -> None:
    verifier = Verifier()
    signature = keys["alice"].sign(STATEMENT)
    before = trusted(trust_directory(tmp_path / "trust", line("alice", keys["alice"])))
    assert isinstance(verifier.verify(STATEMENT, signature, before, at=NOW), Signed)
    after = trusted(trust_directory(tmp_path / "trust", line("bob", keys["bob"])))
    assert refused(verifier.verify(STATEMENT, signature, after, at=NOW)) == "unknown_key"


def test_a_signer_of_other_things_is_not_permitted(keys: dict[str, Key], tmp_path: Path) -> None:
    options = 'namespaces="receipt@ringfence.v1"'
    trust = trusted(trust_directory(tmp_path / "trust", line("alice", keys["alice"], options)))
    assert refused(verify(STATEMENT, keys["alice"].sign(STATEMENT), trust)) == "not_permitted"


# What does not: the trust files

GOOD = f'namespaces="{NAMESPACE}"'


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        pytest.param("* {good} {bob}", "principal", id="a wildcard principal"),
        pytest.param("bob,eve {good} {bob}", "principal", id="a list of principals"),
        pytest.param("!bob {good} {bob}", "principal", id="a negated principal"),
        pytest.param('"bob" {good} {bob}', "principal", id="a quoted principal"),
        pytest.param("bob {bob}", "no_namespaces", id="no namespaces="),
        pytest.param('bob valid-before="20270101Z" {bob}', "no_namespaces", id="a window but no namespaces="),
        pytest.param('bob namespaces="*" {bob}', "namespaces", id="every namespace"),
        pytest.param('bob namespaces="gov*" {bob}', "namespaces", id="a pattern of namespaces"),
        pytest.param('bob namespaces="" {bob}', "namespaces", id="an empty namespace"),
        pytest.param("bob {good},cert-authority {bob}", "certificate", id="a certificate authority"),
        pytest.param("bob cert-authority {bob}", "certificate", id="a bare certificate authority"),
        pytest.param("bob {good},frobnicate {bob}", "options", id="an unknown option"),
        pytest.param("bob {good},{good} {bob}", "options", id="an option twice"),
        pytest.param("bob {good}, {bob}", "options", id="a comma too many"),
        pytest.param('bob {good},valid-before="20270101" {bob}', "local_time", id="valid-before without Z"),
        pytest.param('bob {good},valid-before="20271301Z" {bob}', "local_time", id="a month 13"),
        pytest.param("eve {good} {alice}", "duplicate_key", id="the same key under two principals"),
        pytest.param("alice {good} {alice}", "duplicate_key", id="the same key twice"),
        pytest.param("Alice {good} {bob}", "principal", id="one name spelled two ways"),
        pytest.param("bob {good} {rsa}", "key_type", id="an RSA key"),
        pytest.param("bob {good} ssh-ed25519 AAAA", "bad_key", id="a cut-off key"),
        pytest.param("bob {good} ssh-ed25519-cert-v01@openssh.com AAAA", "certificate", id="a certificate"),
        pytest.param("bob {good} ecdsa-sha2-nistp256 {bobs}", "bad_key", id="a key under another type"),
        pytest.param("bob", "broken_line", id="a name alone"),
        pytest.param("bob {good}", "broken_line", id="no key"),
    ],
)
def test_one_bad_line_refuses_the_whole_file_and_is_named(
    bad: str, code: str, keys: dict[str, Key], tmp_path: Path
) -> None:
    names = {name: key.public for name, key in keys.items()}
    text = bad.format(good=GOOD, bobs=keys["bob"].public.split()[1], **names)
    found = read_trust(trust_directory(tmp_path / "trust", line("alice", keys["alice"]), text + "\n"))
    assert isinstance(found, TrustBroken)
    assert [(problem.line, problem.message.split("]")[0]) for problem in found.problems] == [(2, f"[{code}")]


@pytest.mark.parametrize("data", [b"alice \xff", b"# a\r\n", "alice\u200b x".encode(), b"\0"])
def test_bytes_that_an_eye_cannot_check_refuse_the_file(data: bytes, tmp_path: Path) -> None:
    directory = trust_directory(tmp_path / "trust")
    (directory / "allowed_signers").write_bytes(data)
    assert isinstance(read_trust(directory), TrustBroken)


def test_comments_blanks_and_key_comments_are_fine(keys: dict[str, Key], tmp_path: Path) -> None:
    text = f"# who may loosen\n\n  \talice\t{GOOD}  {keys['alice'].public} alice@laptop of Alice\n"
    assert [one.principal for one in trusted(trust_directory(tmp_path / "trust", text)).signers] == ["alice"]


@pytest.mark.parametrize(
    "text", ["keys SHA256:x\n", "key SHA256:short\n", "id\n", "CHG-1.1\n", "key MD5:00\n", "id a b\n"]
)
def test_a_broken_revocation_refuses_the_file_but_the_others_still_count(
    text: str, keys: dict[str, Key], tmp_path: Path
) -> None:
    revoked = f"key {keys['bob'].fingerprint}\n{text}id CHG-9.1\n"
    found = read_trust(trust_directory(tmp_path / "trust", line("alice", keys["alice"]), revoked=revoked))
    assert isinstance(found, TrustBroken)
    assert [problem.line for problem in found.problems] == [2]
    assert found.revoked_keys == {keys["bob"].fingerprint}
    assert found.revoked_ids == {"CHG-9.1"}


@pytest.mark.parametrize("name", ["allowed_signers", "revoked"])
def test_a_missing_trust_file_refuses(name: str, keys: dict[str, Key], tmp_path: Path) -> None:
    directory = trust_directory(tmp_path / "trust", line("alice", keys["alice"]))
    (directory / name).unlink()
    found = read_trust(directory)
    assert isinstance(found, TrustBroken)
    assert name in found.problems[0].file


def test_trust_files_that_others_can_write_refuse(keys: dict[str, Key], tmp_path: Path) -> None:
    directory = trust_directory(tmp_path / "trust", line("alice", keys["alice"]))
    (directory / "allowed_signers").chmod(0o664)
    assert isinstance(read_trust(directory), TrustBroken)
    (directory / "allowed_signers").chmod(0o644)
    os.chown(directory, 65534, -1)
    assert isinstance(read_trust(directory), TrustBroken)


def test_what_widens_trust_is_listed_and_what_narrows_it_is_not(keys: dict[str, Key], tmp_path: Path) -> None:
    narrow = f'{GOOD},valid-after="20260101Z",valid-before="20270101Z"'
    directory = tmp_path / "trust"
    one = trusted(trust_directory(directory, line("alice", keys["alice"], narrow), revoked="id CHG-1.1\n"))
    wide = trusted(trust_directory(directory, line("alice", keys["alice"]), line("bob", keys["bob"])))
    found = weakenings(one, wide)
    assert [text.split(" ")[0] + " " + text.split(" ")[2] for text in found] == [
        "widens window",
        "adds signer",
        "takes the",
    ]
    assert weakenings(wide, one) == ()
    assert weakenings(one, one) == ()
    assert len(weakenings(None, wide)) == 2


# The program itself


def _program(tmp_path: Path, body: str) -> str:
    program = tmp_path / "ssh-keygen"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return str(program)


def test_a_verification_that_hangs_is_ended_and_tried_again(keys: dict[str, Key], trust: Trust, tmp_path: Path) -> None:
    signature = keys["alice"].sign(STATEMENT)
    verifier = Verifier(_program(tmp_path, "exec sleep 60"), timeout=0.3)
    started = time.monotonic()
    found = verifier.verify(STATEMENT, signature, trust, at=NOW)
    assert time.monotonic() - started < 3
    assert refused(found) == "timeout"
    assert isinstance(found, ReasonRefused)
    assert found.transient
    _program(tmp_path, 'exec /usr/bin/ssh-keygen "$@"')
    assert isinstance(verifier.verify(STATEMENT, signature, trust, at=NOW), Signed)


def test_a_missing_program_admits_nothing(keys: dict[str, Key], trust: Trust, tmp_path: Path) -> None:
    verifier = Verifier(str(tmp_path / "none"))
    assert refused(verifier.verify(STATEMENT, keys["alice"].sign(STATEMENT), trust, at=NOW)) == "verifier_missing"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param("exit 0", "bad_signature", id="it says nothing and exits 0"),
        pytest.param(
            "echo 'Good \"x\" signature for alice with ED25519 key SHA256:x'", "bad_signature", id="another namespace"
        ),
        pytest.param("kill -9 $$", "verifier_failed", id="it dies"),
    ],
)
def test_an_exit_status_alone_proves_nothing(
    body: str, code: str, keys: dict[str, Key], trust: Trust, tmp_path: Path
) -> None:
    verifier = Verifier(_program(tmp_path, body))
    assert refused(verifier.verify(STATEMENT, keys["alice"].sign(STATEMENT), trust, at=NOW)) == code


def test_the_program_gets_sealed_memory_and_a_bare_environment(
    keys: dict[str, Key], trust: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_SK_PROVIDER", str(tmp_path / "evil.so"))
    seen = tmp_path / "seen"
    body = f"env > {seen}; pwd >> {seen}; (echo x >> /proc/self/fd/0) && echo written >> {seen}; exit 1"
    Verifier(_program(tmp_path, body)).verify(STATEMENT, keys["alice"].sign(STATEMENT), trust, at=NOW)
    text = seen.read_text()
    names = {row.partition("=")[0] for row in text.splitlines() if "=" in row} - {"PWD", "_", "SHLVL", "OLDPWD"}
    assert names == {"PATH", "LC_ALL", "TZ"}
    assert text.splitlines()[-1] == "/", "the statement in memory cannot be written"


def test_what_was_verified_is_not_verified_again(keys: dict[str, Key], trust: Trust, tmp_path: Path) -> None:
    count = tmp_path / "count"
    verifier = Verifier(_program(tmp_path, f'echo x >> {count}; exec /usr/bin/ssh-keygen "$@"'))
    signature = keys["alice"].sign(STATEMENT)
    for _ in range(3):
        assert isinstance(verifier.verify(STATEMENT, signature, trust, at=NOW), Signed)
    assert count.read_text() == "x\n"
    verifier.forget(frozenset(), frozenset())
    verifier.verify(STATEMENT, signature, trust, at=NOW)
    assert count.read_text() == "x\nx\n"


# A security key in software: what ssh-keygen alone lets pass


def _security_key(directory: Path) -> tuple[Path, bytes]:
    """Make an Ed25519 key, and the blob that a security key of that public half would have."""
    private = directory / "sk.pem"
    subprocess.run([OPENSSL, "genpkey", "-algorithm", "ed25519", "-out", str(private)], check=True, timeout=10)
    command = [OPENSSL, "pkey", "-in", str(private), "-pubout", "-outform", "DER"]
    public = subprocess.run(command, check=True, capture_output=True, timeout=10).stdout[-32:]
    return private, string(KeyType.SK_ED25519.encode()) + string(public) + string(b"ssh:")


def _touched(private: Path, blob: bytes, flags: int) -> bytes:
    """Sign STATEMENT as such a key does (PROTOCOL.u2f and PROTOCOL.sshsig of OpenSSH)."""
    body = string(NAMESPACE.encode()) + string(b"") + string(b"sha512")
    signed = b"SSHSIG" + body + string(hashlib.sha512(STATEMENT).digest())
    counter = (7).to_bytes(4)
    data = private.with_suffix(".data")
    data.write_bytes(hashlib.sha256(b"ssh:").digest() + bytes([flags]) + counter + hashlib.sha256(signed).digest())
    command = [OPENSSL, "pkeyutl", "-sign", "-rawin", "-inkey", str(private), "-in", str(data)]
    raw = subprocess.run(command, check=True, capture_output=True, timeout=10).stdout
    inner = string(KeyType.SK_ED25519.encode()) + string(raw) + bytes([flags]) + counter
    return armored(b"SSHSIG" + (1).to_bytes(4) + string(blob) + body + string(inner))


@pytest.mark.parametrize(("flags", "code"), [(0x01, None), (0x05, None), (0x00, "not_touched"), (0x04, "not_touched")])
def test_a_good_signature_of_a_security_key_counts_only_with_a_touch(
    flags: int, code: str | None, tmp_path: Path
) -> None:
    private, blob = _security_key(tmp_path)
    signature = _touched(private, blob, flags)
    signer = f'alice namespaces="{NAMESPACE}" {KeyType.SK_ED25519.value} {base64.b64encode(blob).decode()}\n'
    trust = trusted(trust_directory(tmp_path / "trust", signer))
    (tmp_path / "signature").write_bytes(signature)
    command = ["/usr/bin/ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-I", "alice"]
    command += ["-f", str(tmp_path / "trust" / "allowed_signers"), "-s", str(tmp_path / "signature")]
    alone = subprocess.run(command, input=STATEMENT, capture_output=True, check=False, timeout=10)
    assert alone.returncode == 0, "ssh-keygen alone lets it pass, touched or not"
    found = verify(STATEMENT, signature, trust)
    assert (found.code if isinstance(found, ReasonRefused) else None) == code


class _Steps:
    """A clock on which each look takes so long."""

    def __init__(self, step: float) -> None:
        self.time, self.step = 0.0, step

    def __call__(self) -> float:
        self.time += self.step
        return self.time


def test_a_pass_looks_at_so_many_signatures_and_the_next_goes_on(
    keys: dict[str, Key], trust: Trust, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    program = _program(tmp_path, f'echo x >> {count}; exec /usr/bin/ssh-keygen "$@"')
    verifier = Verifier(program, budget=3.0, clock=_Steps(1.0))
    good = keys["alice"].sign(STATEMENT)
    statements = [STATEMENT + b"#" * number for number in range(5)]
    answers = []
    for _ in range(4):
        verifier.begin()
        found = [verifier.verify(statement, good, trust, at=NOW) for statement in statements]
        answers.append([one.code if isinstance(one, ReasonRefused) else "signed" for one in found])
    later = "not_looked_at"
    assert answers[0] == ["signed", "bad_signature", later, later, later]
    assert answers[-1] == ["signed", *["bad_signature"] * 4]
    assert count.read_text() == "x\n" * 5


def test_one_that_only_knows_looks_at_nothing(keys: dict[str, Key], trust: Trust, tmp_path: Path) -> None:
    verifier = Verifier()
    signature = keys["alice"].sign(STATEMENT)
    assert isinstance(verifier.verify(STATEMENT, signature, trust, at=NOW), Signed)
    knowing = verifier.knowing()
    knowing.begin()
    assert isinstance(knowing.verify(STATEMENT, signature, trust, at=NOW), Signed)
    other = knowing.verify(STATEMENT + b"#", signature, trust, at=NOW)
    assert isinstance(other, ReasonRefused)
    assert other.code == "not_looked_at"
    knowing.forget(frozenset(), frozenset())
    away = Verifier(str(tmp_path / "away"))
    away._known = verifier._known
    assert isinstance(away.verify(STATEMENT, signature, trust, at=NOW), Signed)
