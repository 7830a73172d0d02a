"""Which signature belongs to which statement, and what a transient failure must not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reconciler import admission
from reconciler.admission import MOST_SIGNATURES, Admission, Admissions, admit, statement_of
from reconciler.core.statement import Terms
from reconciler.core.trust import Trust
from reconciler.reason import Signed, Verifier, read_trust
from tests.estate import PLATFORM, Estate, agent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TERMS = Terms(host="prod-1", ticket_pattern="[A-Z]+-[0-9]+", max_age=None)


@pytest.mark.parametrize(
    ("signature", "statement"),
    [
        ("reasons/CHG-1.alice.sig", "reasons/CHG-1.yaml"),
        ("reasons/CHG-1.2.alice.sig", "reasons/CHG-1.2.yaml"),
        ("reasons/CHG-1.alice@example.com.sig", "reasons/CHG-1.yaml"),
        ("reasons/CHG-10.alice.sig", None),
        ("reasons/CHG-1.sig", None),
    ],
)
def test_a_signature_belongs_to_the_statement_with_the_longest_name_that_fits(
    signature: str, statement: str | None
) -> None:
    assert statement_of(signature, ["reasons/CHG-1.yaml", "reasons/CHG-1.2.yaml"]) == statement


class Counted(dict[str, None]):
    """Statements that know how often one of them was looked at."""

    asked = 0

    def __contains__(self, key: object) -> bool:
        """Count."""
        self.asked += 1
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        """Count each."""
        for key in super().__iter__():
            self.asked += 1
            yield key


def test_finding_a_statement_costs_the_same_however_many_there_are() -> None:
    statements = Counted({f"reasons/CHG-{number}.yaml": None for number in range(20_000)})
    assert statement_of("reasons/CHG-19999.alice.sig", statements) == "reasons/CHG-19999.yaml"
    assert statements.asked <= 2


def judged(estate: Estate, before: tuple[Admission, ...], verifier: Verifier) -> Admissions:
    folder = estate.root / "policy" / "reasons"
    files = {f"reasons/{path.name}": path.read_bytes() for path in folder.iterdir()}
    trust = read_trust(estate.root / "trust")
    return admit(files, trust, before, now=estate.clock.now(), terms=TERMS, verifier=verifier)


def test_what_was_admitted_stays_while_ssh_keygen_is_away_and_nothing_new_joins(tmp_path: Path) -> None:
    estate = Estate(tmp_path)
    estate.reason(1, {"document": "platform", "field": "/enabled", "value": True})
    first = judged(estate, (), Verifier())
    before = tuple(one for admitted in first.admitted for one in admitted.admissions)
    assert len(before) == 1
    estate.reason(2, {"document": "platform", "field": "/enabled", "value": True})
    later = judged(estate, before, Verifier(str(tmp_path / "away")))
    assert [one.statement.id for one in later.admitted] == ["CHG-1.1"]
    assert [one.code for one in later.refused] == ["verifier_missing"]


def test_an_admission_survives_its_json(tmp_path: Path) -> None:
    estate = Estate(tmp_path)
    estate.reason(1, {"document": "platform", "field": "/enabled", "value": True})
    (one,) = judged(estate, (), Verifier()).admitted[0].admissions
    assert Admission.from_json(one.to_json()) == one


ALLOW = {"document": "agents/helper", "field": "/allow", "add": "api.vendor.com"}
NEW = {"document": "agents/helper", "field": "/allow", "add": "new.vendor.com"}
BASE = (
    {"document": "platform", "field": "/enabled", "value": True},
    {"document": "agents/helper", "field": "/minimum_isolation", "value": "namespace"},
)


class Looks:
    """A real ssh-keygen that is counted, and a clock on which each look takes a second."""

    def __init__(self, directory: Path) -> None:
        self.count = directory / "looks"
        self.count.touch()
        self.program = directory / "counted"
        self.program.write_text(f'#!/bin/sh\necho x >> {self.count}\nexec /usr/bin/ssh-keygen "$@"\n')
        self.program.chmod(0o755)

    def made(self) -> int:
        """Say how many there were."""
        return len(self.count.read_text().splitlines())

    def verifier(self, budget: float) -> Verifier:
        """Make a verifier that has time for so many looks in one pass."""
        return Verifier(str(self.program), budget=budget, clock=lambda: float(self.made()))


@pytest.fixture
def estate(tmp_path: Path) -> Estate:
    """A host on which helper may reach api.vendor.com until the end of the year, by alice's signature."""
    made = Estate(tmp_path)
    made.write(platform=PLATFORM, helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    made.reason(5, *BASE, ALLOW)
    made.run()
    assert made.allows() == ["api.vendor.com"]
    return made


def bomb(estate: Estate, number: int = 20) -> None:
    """Commit statements with signatures that are well formed, by a signer's key, and of other bytes."""
    folder = estate.root / "policy" / "reasons"
    signature = (folder / "CHG-5.alice.sig").read_bytes()
    for one in range(number):
        (folder / f"CHG-0{one:02}.yaml").write_text(f"# {one}\n")
        (folder / f"CHG-0{one:02}.alice.sig").write_bytes(signature)


def junk(estate: Estate, statement: Path, number: int = 40) -> None:
    """Put signatures of other bytes, by the same key, beside a statement."""
    for one in range(number):
        statement.with_suffix(f".{one:02}.sig").write_bytes(estate.keys["alice"].sign(b"%d\n" % one))


def test_a_bomb_of_signatures_takes_a_pass_its_share_of_time_and_admits_nothing(estate: Estate, tmp_path: Path) -> None:
    looks = Looks(tmp_path)
    bomb(estate)
    estate.reason(9, NEW)
    estate.restart()
    estate.config._verifier = looks.verifier(4)
    found = estate.run()
    assert looks.made() == 4
    assert len(found.admissions.waiting) == 18
    assert found.wake is not None
    assert found.wake <= estate.clock.now()
    assert estate.allows() == ["api.vendor.com"]
    passes = 1
    while found.admissions.waiting:
        found, passes = estate.run(), passes + 1
    assert (looks.made(), passes) == (22, 6)
    assert estate.allows() == ["api.vendor.com", "new.vendor.com"]
    estate.run()
    assert looks.made() == 22
    assert [row["code"] for row in estate.rows("reason.refused")] == ["bad_signature"] * 20


@pytest.mark.parametrize("restarted", [False, True])
def test_what_counts_is_looked_at_first_and_what_ended_ends_under_a_bomb(
    restarted: bool, estate: Estate, tmp_path: Path
) -> None:
    bomb(estate)
    if restarted:
        estate.restart()
    looks = Looks(tmp_path)
    estate.config._verifier = looks.verifier(1)
    found = estate.run()
    assert estate.allows() == ["api.vendor.com"]
    statement = estate.root / "policy" / "reasons" / "CHG-5.yaml"
    knowing, trust = estate.config._verifier.knowing(), read_trust(estate.root / "trust")
    assert isinstance(trust, Trust)
    signature = statement.with_suffix(".alice.sig").read_bytes()
    seen = knowing.verify(statement.read_bytes(), signature, trust, at=estate.clock.now())
    assert isinstance(seen, Signed)
    estate.clock.turn(days=365)
    found = estate.run()
    assert found.admissions.waiting
    assert estate.allows() == []


def test_of_a_statement_with_very_many_signatures_so_many_are_looked_at(estate: Estate, tmp_path: Path) -> None:
    folder = estate.root / "policy" / "reasons"
    other = estate.reason(9, NEW)
    (folder / "CHG-9.alice.sig").rename(folder / "CHG-9.zoe.sig")
    junk(estate, other)
    looks = Looks(tmp_path)
    estate.config._verifier = looks.verifier(1000)
    found = estate.run()
    assert looks.made() == 1 + MOST_SIGNATURES
    assert estate.allows() == ["api.vendor.com"]
    assert "too_many_signatures" in {one.code for one in found.admissions.refused}
    assert found.admissions.waiting == ()


@pytest.mark.parametrize("restarted", [False, True])
def test_very_many_signatures_beside_a_good_one_do_not_end_a_grant_that_counts(
    restarted: bool, estate: Estate, tmp_path: Path
) -> None:
    folder = estate.root / "policy" / "reasons"
    (folder / "CHG-5.alice.sig").rename(folder / "CHG-5.zoe.sig")
    junk(estate, folder / "CHG-5.yaml")
    if restarted:
        estate.restart()
    looks = Looks(tmp_path)
    estate.config._verifier = looks.verifier(1000)
    estate.run()
    assert looks.made() <= MOST_SIGNATURES
    assert estate.allows() == ["api.vendor.com"]


def test_a_statement_that_somebody_signed_is_read_once_whatever_it_says(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    estate.reason(6, ALLOW, expires="2020-01-01T00:00:00Z")
    estate.reason(7, ALLOW, reason="CHG-7")
    estate.run()
    read: list[str] = []
    monkeypatch.setattr(admission, "read", lambda file, _: read.append(file))
    found = estate.run()
    assert {one.code for one in found.admissions.refused} == {"expired", "bad_statement"}
    assert read == []
