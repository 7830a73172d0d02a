"""Which signature belongs to which statement, and what a transient failure must not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reconciler.admission import Admission, Admissions, admit, statement_of
from reconciler.core.statement import Terms
from reconciler.reason import Verifier, read_trust
from tests.estate import Estate

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
