"""Nothing that an image can carry gets out or at others, on any backend; in the open all of it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.attacks import arena, control, report
from tests.e2e.attacks.floods import FLOODS, Flood
from tests.e2e.attacks.table import Group, Open

if TYPE_CHECKING:
    from tests.e2e.attacks.arena import Round
    from tests.e2e.attacks.control import Shown
    from tests.e2e.installation import Installation

pytestmark = [pytest.mark.rig, pytest.mark.timeout(240)]
LISTED: Final = {"example.com", "private.example.com", "metadata.example.com", "mixed.example.com", "api.vendor.com"}
"""Names that a list of this round has, and somebody asked for."""


@pytest.fixture(scope="module")
def fought(bare: Installation) -> Round:
    """One round on this backend."""
    return arena.fight(bare)


@pytest.fixture(scope="session")
def shown() -> dict[str, Shown]:
    """The control run."""
    return control.run()


@pytest.mark.parametrize("group", Group)
def test_in_the_open_every_attack_comes_to_something(shown: dict[str, Shown], group: Group) -> None:
    table = [attack for attack in arena.names() if attack.group is group]
    assert [f"{attack.name}: {shown[attack.name]}" for attack in table if not arena.opens(attack, shown)] == []


@pytest.mark.parametrize("group", Group)
def test_behind_the_fence_no_attack_comes_to_anything(fought: Round, group: Group) -> None:
    assert fought.defeats(group) == []


def test_every_attack_of_the_table_was_tried(fought: Round) -> None:
    assert (fought.result["code"], fought.result["status"]) == ("exited", 0)
    assert set(fought.lines) == {attack.name for attack in arena.names()} == {attack.name for attack in fought.table}
    assert {line["outcome"] for line in fought.lines.values()} >= {"failed", "denied"}


def test_nothing_arrives_anywhere(fought: Round) -> None:
    assert fought.arrivals == ()


def test_no_name_is_asked_for_that_no_list_has(fought: Round) -> None:
    assert fought.asked <= LISTED
    assert "example.com" in fought.asked, "what is asked for is seen"


def test_nothing_arrives_at_the_neighbour_which_works_on(fought: Round) -> None:
    assert set(fought.neighbour_said) == {"listening", "answer 200"}
    assert set(fought.neighbour_decisions) == {("api.vendor.com", "allow")}
    assert fought.neighbour["code"] == "cancelled"
    assert fought.answered_after_floods


def test_the_gate_of_a_sandbox_that_is_made_meanwhile_proves_its_fence(fought: Round) -> None:
    newcomer = fought.newcomer
    assert (newcomer["code"], newcomer["status"], newcomer["gate"]["passed"]) == ("exited", 0, True)
    assert newcomer["gate"]["arrivals"] == []
    assert newcomer["times"]["claimed"] < fought.result["times"]["exited"], "they were there at once"


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
def test_a_flood_is_bounded(fought: Round, flood: Flood) -> None:
    result = fought.floods[flood.name]
    assert result["code"] in flood.ends, result
    assert fought.too_much == {}


def test_nothing_is_left(fought: Round) -> None:
    assert fought.left == ()


def test_the_page_has_a_line_for_every_attack_and_no_defeat() -> None:
    rows = [line.split(" | ") for line in report.PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    cells = {row[0].removeprefix("| "): row[1:] for row in rows}
    assert {attack.name for attack in arena.names()} <= set(cells)
    assert not [name for name, row in cells.items() if any(cell.startswith("broken") for cell in row)]
    counts = cells["arrivals at listeners of the host, of the internet, and on the link"]
    assert {count.removesuffix(" |") for count in counts} == {"0"}


def test_an_attack_that_comes_to_something_is_a_defeat() -> None:
    """The judge itself: what reached is never taken for failed."""
    for attack in arena.names():
        if attack.group is Group.PROXY:
            stolen = 'HTTP/1.1 200 OK\r\n\r\n{"headers": [["Host", "evil.com"]]}'
            assert not arena.failed(attack, {"outcome": "reached", "detail": {"received": stolen}})
        elif not (attack.group is Group.NAMES and attack.opens is Open.FENCED):
            assert not arena.failed(attack, {"outcome": "reached", "detail": {}})
        assert not arena.failed(attack, {"outcome": "broken", "detail": {}})
