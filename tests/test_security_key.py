"""Security keys end to end, with OpenSSH's own in software: what it signs counts with a touch, and only with one."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from reconciler.core.sshsig import Malformed, parse_signature
from reconciler.core.statement import ReasonRefused
from reconciler.core.trust import NAMESPACE, Trust
from reconciler.reason import Signed, Verifier, read_trust, sign
from tests.estate import PLATFORM, Estate, agent
from tests.rig.security_key import BUILD, security_key
from tests.signing import Key, line, trust_directory

if TYPE_CHECKING:
    from collections.abc import Callable

STATEMENT = b"a statement\n"
NOW = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
HELPERS = Path("/usr/lib/openssh/ssh-sk-helper")

Enroll: TypeAlias = "Callable[..., Key]"


@pytest.fixture
def enroll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Enroll:
    """Make keys on the security key in software, which signs too from here on."""
    part = security_key()
    if not part.built or not HELPERS.exists():
        pytest.skip(f"OpenSSH's security key in software is not built: {BUILD}")
    provider = str(part.path / "sk-dummy.so")
    monkeypatch.setenv("SSH_SK_PROVIDER", provider)

    def make(name: str, kind: str = "ed25519-sk", *options: str) -> Key:
        path = tmp_path / name
        asked = [argument for option in options for argument in ("-O", option)]
        command = ["ssh-keygen", "-q", "-w", provider, "-t", kind, "-N", "", "-C", name, *asked, "-f", str(path)]
        subprocess.run(command, check=True, timeout=30, capture_output=True)
        return Key(path)

    return make


def trusted(tmp_path: Path, *keys: Key) -> Trust:
    lines = [line(key.private.name, key) for key in keys]
    found = read_trust(trust_directory(tmp_path / "trust", *lines))
    assert isinstance(found, Trust), found
    return found


@pytest.mark.parametrize("kind", ["ed25519-sk", "ecdsa-sk"])
def test_a_signature_with_a_touch_is_accepted(kind: str, enroll: Enroll, tmp_path: Path) -> None:
    key = enroll("alice", kind)
    found = Verifier().verify(STATEMENT, key.sign(STATEMENT), trusted(tmp_path, key), at=NOW)
    assert found == Signed("alice", key.fingerprint)


@pytest.mark.parametrize("kind", ["ed25519-sk", "ecdsa-sk"])
def test_a_signature_without_a_touch_is_refused_though_ssh_keygen_alone_takes_it(
    kind: str, enroll: Enroll, tmp_path: Path
) -> None:
    key = enroll("alice", kind, "no-touch-required")
    signature = key.sign(STATEMENT)
    trust = trusted(tmp_path, key)
    (tmp_path / "signature").write_bytes(signature)
    command = ["ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-I", "alice"]
    command += ["-f", str(tmp_path / "trust" / "allowed_signers"), "-s", str(tmp_path / "signature")]
    alone = subprocess.run(command, input=STATEMENT, capture_output=True, check=False, timeout=10)
    assert alone.returncode == 0
    found = Verifier().verify(STATEMENT, signature, trust, at=NOW)
    assert isinstance(found, ReasonRefused)
    assert found.code == "not_touched"


def test_a_signature_of_other_bytes_is_refused(enroll: Enroll, tmp_path: Path) -> None:
    key = enroll("alice")
    found = Verifier().verify(STATEMENT + b"x", key.sign(STATEMENT), trusted(tmp_path, key), at=NOW)
    assert isinstance(found, ReasonRefused)
    assert found.code == "bad_signature"


def test_a_certificate_of_a_security_key_is_refused(enroll: Enroll, tmp_path: Path) -> None:
    key, authority = enroll("alice"), enroll("authority", "ed25519-sk", "no-touch-required")
    command = ["ssh-keygen", "-q", "-s", str(authority.private), "-I", "x", "-n", "alice", f"{key.private}.pub"]
    subprocess.run(command, check=True, timeout=30, capture_output=True, env={**os.environ})
    certificate = tmp_path / "alice-cert.pub"
    kind, blob = certificate.read_text().split()[:2]
    assert kind == "sk-ssh-ed25519-cert-v01@openssh.com"
    signed = subprocess.run(
        ["/usr/bin/ssh-keygen", "-Y", "sign", "-f", str(certificate), "-n", NAMESPACE],
        input=STATEMENT,
        capture_output=True,
        check=False,
        timeout=30,
    )
    if signed.returncode == 0:
        found = parse_signature(signed.stdout)
        assert isinstance(found, Malformed)
        assert found.code == "certificate"
    trust = read_trust(trust_directory(tmp_path / "trust", f'alice namespaces="{NAMESPACE}" {kind} {blob}\n'))
    assert not isinstance(trust, Trust)


def test_what_a_security_key_signed_takes_effect_on_a_host(enroll: Enroll, tmp_path: Path) -> None:
    estate = Estate(tmp_path)
    estate.keys["alice"] = enroll("token")
    estate.keys["bob"] = enroll("untouched", "ed25519-sk", "no-touch-required")
    estate.trust("alice", "bob")
    estate.write(platform=PLATFORM, helper=agent(allow=["one.vendor.com", "two.vendor.com"]))
    for number, (name, host) in enumerate((("alice", "one"), ("bob", "two")), start=1):
        path = estate.reason(
            number, {"document": "agents/helper", "field": "/allow", "add": f"{host}.vendor.com"}, by=[]
        )
        out = path.with_suffix(f".{name}.sig")
        refused = sign(path, estate.keys[name].private, out)
        if name == "alice":
            assert refused is None
        else:
            assert refused is not None
            assert "touch" in refused.message
            out.write_bytes(estate.keys[name].sign(path.read_bytes()))
    found = estate.run()
    assert estate.allows() == ["one.vendor.com"]
    assert [one.code for one in found.admissions.refused] == ["not_touched"]
