"""Signed reasons that somebody tries to stretch: to other agents and hosts, wider entries, one person twice."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from reconciler.commands.reason import mending
from tests.estate import PLATFORM, Estate, agent
from tests.signing import line, make_key, trust_directory

if TYPE_CHECKING:
    from pathlib import Path

ANYBODYS = {"document": "agents/helper", "field": "/allow", "add": "*.github.io"}
NEW = {"document": "agents/helper", "field": "/allow", "add": "new.vendor.com"}


@pytest.fixture
def estate(tmp_path: Path) -> Estate:
    made = Estate(tmp_path)
    made.write(
        platform=PLATFORM,
        helper=agent(allow=["new.vendor.com", "*.github.io"]),
        other=agent("other", ["new.vendor.com"]),
    )
    return made


def test_what_costs_two_is_let_pass_by_two_people_with_a_key_each(estate: Estate) -> None:
    estate.reason(1, ANYBODYS, by=["alice"])
    estate.run()
    assert estate.allows() == []
    path = estate.reason(1, ANYBODYS, by=["alice", "bob"])
    estate.run()
    assert estate.allows() == ["*.github.io"]
    update = next(row for row in estate.rows("config.update") if row["object"] == "agents/helper#/allow")
    assert update["actor"] == "alice,bob"
    path.with_suffix(".bob.sig").unlink()
    estate.run()
    assert estate.allows() == [], "one of two is not enough any more"


def test_one_person_with_two_keys_is_one(estate: Estate) -> None:
    second = estate.keys["alice-laptop"] = make_key(estate.root, "alice-laptop")
    lines = [line("alice", estate.keys["alice"]), line("alice", second), line("bob", estate.keys["bob"])]
    trust_directory(estate.root / "trust", *lines)
    estate.reason(1, ANYBODYS, by=["alice", "alice-laptop"])
    found = estate.run()
    assert [approval.signer for approval in found.admissions.admitted[0].approvals] == ["alice", "alice"]
    assert estate.allows() == []


def test_one_signature_copied_under_two_names_is_one(estate: Estate) -> None:
    path = estate.reason(1, ANYBODYS, by=["alice"])
    shutil.copy(path.with_suffix(".alice.sig"), path.with_suffix(".bob.sig"))
    estate.run()
    assert estate.allows() == []


def test_two_statements_of_one_person_each_are_not_one_of_two(estate: Estate) -> None:
    estate.reason(1, ANYBODYS, by=["alice"])
    estate.reason(2, ANYBODYS, by=["bob"])
    estate.run()
    assert estate.allows() == []


def test_a_statement_lifted_to_another_agent_counts_for_the_one_it_names(estate: Estate) -> None:
    path = estate.reason(1, NEW)
    lifted = path.read_bytes().replace(b"agents/helper", b"agents/other")
    path.with_name("CHG-2.yaml").write_bytes(lifted)
    shutil.copy(path.with_suffix(".alice.sig"), path.with_name("CHG-2.alice.sig"))
    found = estate.run()
    assert (estate.allows(), estate.allows("other")) == (["new.vendor.com"], [])
    assert [(one.file, one.code) for one in found.admissions.refused] == [("reasons/CHG-2.alice.sig", "bad_signature")]


def test_a_statement_lifted_to_another_host_counts_for_nothing(estate: Estate, tmp_path: Path) -> None:
    path = estate.reason(1, NEW)
    (tmp_path / "elsewhere").mkdir()
    other = Estate(tmp_path / "elsewhere", name="test-1")
    trust_directory(other.root / "trust", line("alice", estate.keys["alice"]))
    other.write(platform=PLATFORM, helper=agent(allow=["new.vendor.com"]))
    for file in (path, path.with_suffix(".alice.sig")):
        shutil.copy(file, other.root / "policy" / "reasons")
    found = other.run()
    assert found.admissions.elsewhere == ("reasons/CHG-1.yaml",)
    assert other.allows() == []


def test_a_grant_licenses_nothing_wider_than_it_names(estate: Estate) -> None:
    estate.reason(1, {**NEW, "add": "a.vendor.com:443"})
    estate.write(helper=agent(allow=["*.vendor.com", "a.vendor.com"]))
    estate.run()
    assert estate.allows() == ["a.vendor.com:443"]
    estate.write(helper=agent(allow=["a.vendor.com"]))
    estate.run()
    assert estate.allows() == ["a.vendor.com:443"]


@pytest.mark.parametrize("way", ["expired", "revoked"])
def test_what_ended_and_is_put_back_counts_no_more(way: str, estate: Estate) -> None:
    path = estate.reason(1, NEW, expires="2026-06-01T13:00:00Z")
    kept = {file: file.read_bytes() for file in (path, path.with_suffix(".alice.sig"))}
    estate.run()
    assert estate.allows() == ["new.vendor.com"]
    if way == "expired":
        estate.clock.turn(hours=1)
    else:
        estate.trust("alice", "bob", revoked="id CHG-1.1\n")
    estate.run()
    estate.unreason(1)
    estate.run()
    for file, data in kept.items():
        file.write_bytes(data)
    if way == "expired":
        estate.clock.turn(hours=-2)
        estate.restart()
    found = estate.run()
    assert estate.allows() == []
    assert [one.code for one in found.admissions.refused] == ["expired" if way == "expired" else "id_revoked"]


def test_a_denial_that_was_lifted_for_an_hour_comes_back(estate: Estate) -> None:
    def denied() -> list[str]:
        assert estate.config.in_force is not None
        return [str(entry) for entry in estate.config.in_force.agents["helper"].agent.deny]

    estate.write(helper=agent(deny='["files.vendor.com"]'))
    estate.run()
    estate.write(helper=agent())
    estate.run()
    assert denied() == ["files.vendor.com"]
    lift = {"document": "agents/helper", "field": "/deny", "remove": "files.vendor.com"}
    estate.reason(1, lift, expires="2026-06-01T13:00:00Z")
    found = estate.run()
    assert denied() == []
    assert found.wake is not None
    estate.clock.time = found.wake
    estate.run()
    assert denied() == ["files.vendor.com"]


CODES = """
altered bad_key bad_signature bad_statement certificate crlf duplicate_id expired hash_algorithm id_revoked key_revoked
key_type malformed_signature no_end no_signature no_statement not_a_signature not_permitted not_touched second_signature
signature_too_large signer_expired statement_too_large ticket too_long trailing_bytes trust_broken unknown_key
verifier_missing wrong_namespace
"""


@pytest.mark.parametrize("code", CODES.split())
def test_each_refusal_that_a_command_mends_names_the_command(code: str, tmp_path: Path) -> None:
    found = mending(code, tmp_path / "CHG-1.yaml", tmp_path / "trust")
    assert found is not None
    assert any(word in found for word in ("ringfence reason sign", "allowed_signers", "git rm", "apt-get"))
