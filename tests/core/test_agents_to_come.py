"""What limits every agent limits those to come: an egress document for `*` does not go away because nobody is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reconciler.core import reconcile as formula
from reconciler.core.plan import plan
from reconciler.core.policy import in_force
from reconciler.core.validate import desired
from tests.core.scene import Host, agent, effective, egress, force, missing, platform, signed

if TYPE_CHECKING:
    from reconciler.core.policy import Layer
    from reconciler.core.reconcile import Outcome

ON = ("platform", "/enabled", "value", True)
BASE = platform(enabled=True)
ALL = egress(allow=["a.com"], deny=["b.com"], deny_ranges=["161.26.0.0/16"])
SIGNED = signed(ON, ("egress/org", "/allow", "add", "a.com"))
LIFT = ("egress/org", "/agents", "remove", "*")


def layers(outcome: Outcome, name: str = "joiner") -> tuple[Layer, ...]:
    return effective(outcome, name).layers


AWAY = [
    pytest.param({}, id="deleted"),
    pytest.param(egress(agents=[], allow=["a.com"]), id="emptied of every agent"),
    pytest.param(egress(agents=["helper"], allow=["a.com"], deny=["b.com"]), id="narrowed to one agent"),
]


@pytest.mark.parametrize("after", AWAY)
def test_an_agent_that_joins_is_under_a_document_that_nobody_signed_away(after: dict[str, bytes]) -> None:
    host = Host()
    before = host.good(BASE | agent() | ALL, SIGNED)
    host.good(BASE | agent() | after, SIGNED)
    outcome = host.good(BASE | agent() | agent("joiner") | after, SIGNED)
    assert layers(outcome) == effective(before).layers
    assert LIFT in missing(outcome)


def test_a_renamed_document_stays_under_its_old_name_for_whoever_joins() -> None:
    host = Host()
    host.good(BASE | ALL, SIGNED)
    host.good(BASE | egress("renamed"), SIGNED)
    outcome = host.good(BASE | egress("renamed") | agent("joiner"), SIGNED)
    assert [layer.name for layer in layers(outcome)] == ["org", "renamed"]


@pytest.mark.parametrize("after", AWAY)
def test_it_is_held_also_where_no_agent_is_there_and_one_grant_lifts_it(after: dict[str, bytes]) -> None:
    host = Host()
    host.good(BASE | ALL, SIGNED)
    outcome = host.good(BASE | after, SIGNED)
    assert missing(outcome) == [LIFT]
    (held,) = [one for one in outcome.held if one.field == "/agents"]
    assert (held.agents, held.before, held.after, held.wanted) == (("*",), ["*"], ["*"], [])
    outcome = host.good(BASE | after, (*SIGNED, *signed(LIFT)))
    assert missing(outcome) == []
    (change,) = outcome.changes
    assert (change.document, change.field, change.agents, change.weakening) == ("egress/org", "/agents", ("*",), True)
    outcome = host.good(BASE | after | agent("joiner"), (*SIGNED, *signed(LIFT)))
    assert layers(outcome) == ()


def test_a_grant_for_a_present_agent_lifts_nothing_from_those_to_come() -> None:
    host = Host()
    host.good(BASE | agent() | ALL, SIGNED)
    grants = (*SIGNED, *signed(("egress/org", "/agents", "remove", "helper")))
    outcome = host.good(BASE | agent(), grants)
    assert layers(outcome, "helper") == ()
    assert missing(outcome) == [LIFT]
    assert [layer.name for layer in layers(host.good(BASE | agent() | agent("joiner"), grants))] == ["org"]


def test_a_grant_that_names_an_agent_to_come_lifts_it_from_that_one_alone() -> None:
    host = Host()
    host.good(BASE | ALL, SIGNED)
    grants = (*SIGNED, *signed(("egress/org", "/agents", "remove", "joiner")))
    outcome = host.good(BASE | agent("joiner") | agent("other"), grants)
    assert layers(outcome) == ()
    assert [layer.name for layer in layers(outcome, "other")] == ["org"]


def test_a_loosening_of_a_document_for_all_is_held_for_those_to_come() -> None:
    host = Host()
    host.good(BASE | ALL, SIGNED)
    loose = egress(default="allow", allow=["a.com", "c.com"])
    outcome = host.good(BASE | loose, SIGNED)
    assert missing(outcome) == [
        ("egress/org", "/allow", "add", "c.com"),
        ("egress/org", "/default", "value", "allow"),
        ("egress/org", "/deny", "remove", "b.com"),
        ("egress/org", "/deny_ranges", "remove", "161.26.0.0/16"),
    ]
    (layer,) = layers(host.good(BASE | loose | agent("joiner"), SIGNED))
    assert not layer.default_allow
    assert [str(entry) for entry in layer.allow] == ["a.com"]
    assert [str(entry) for entry in layer.deny] == ["b.com"]
    assert layer.deny_ranges == ("161.26.0.0/16",)


def test_when_the_grant_ends_the_layer_comes_back_for_whoever_joined_meanwhile() -> None:
    host = Host()
    before = host.good(BASE | agent() | ALL, SIGNED)
    lift = signed(LIFT, identifier="CHG-2", expires=host.now + 60)
    assert layers(host.good(BASE | agent() | agent("joiner"), (*SIGNED, *lift))) == ()
    host.now += 60
    outcome = host.good(BASE | agent() | agent("joiner"), (*SIGNED, *lift))
    assert layers(outcome) == layers(outcome, "helper") == effective(before).layers
    assert not any(change.weakening for change in outcome.changes)


def come_back() -> None:
    host = Host()
    host.good(BASE | agent("joiner") | egress(allow=["a.com"], deny=["old.com"]), SIGNED)
    host.good(BASE | egress(allow=["a.com"], deny=["old.com"]), SIGNED)
    host.good(BASE | egress(deny=["new.com"]) | egress("team"), SIGNED)
    host.good(BASE, SIGNED)
    org, team = layers(host.good(BASE | agent("joiner"), SIGNED))
    assert (org.name, team.name) == ("org", "team")
    assert org.allow == (), "the last content for all, not that of the agent's own time"
    assert [str(entry) for entry in org.deny] == ["new.com", "old.com"]


def test_who_comes_back_is_under_what_was_committed_for_all_while_it_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    come_back()
    monkeypatch.setattr(formula._Pass, "_last_of_absent", lambda _self, last: last)
    with pytest.raises(AssertionError, match="not that of the agent's own time"):
        come_back()


def test_a_layer_that_was_narrowed_and_then_changed_stays_as_it_was_for_each() -> None:
    host = Host()
    grants = (*SIGNED, *signed(("egress/org", "/allow", "add", "c.com")))
    host.good(BASE | agent() | egress(allow=["a.com"]), grants)
    host.good(BASE | agent() | egress(agents=["helper"], allow=["c.com"]), grants)
    outcome = host.good(BASE | agent() | agent("joiner"), grants)
    assert [str(entry) for entry in layers(outcome, "helper")[0].allow] == ["c.com"]
    assert [str(entry) for entry in layers(outcome)[0].allow] == ["a.com"]


def test_a_new_host_knows_of_no_layer_that_is_gone() -> None:
    outcome = Host().good(BASE | agent("joiner") | egress(agents=["helper"]), SIGNED)
    assert layers(outcome) == ()
    assert missing(outcome) == []


def test_an_empty_directory_lifts_nothing_from_those_to_come() -> None:
    host = Host()
    host.good(BASE | ALL, SIGNED)
    outcome = host.run({})
    assert outcome.changes == ()
    assert [layer.name for layer in force(outcome).to_come] == ["org"]


def test_a_bad_document_holds_a_signed_lift_from_those_to_come() -> None:
    host = Host()
    host.good(BASE | ALL, SIGNED)
    lift = (*SIGNED, *signed(LIFT))
    outcome = host.run(BASE | {"egress/other.yaml": b"x"}, lift)
    assert [layer.name for layer in force(outcome).to_come] == ["org"]
    assert [(held.document, held.field, held.agents) for held in outcome.held] == [("egress/org", "/agents", ("*",))]
    assert missing(outcome) == [], "it is signed for: the problem has to be mended"
    assert force(host.good(BASE, lift)).to_come == ()


def test_a_state_of_a_version_that_knew_of_no_agents_to_come_is_read() -> None:
    host = Host()
    host.good(BASE | agent() | ALL, SIGNED)
    tree = host.memory.to_json()
    for part in ("baseline", "last_layers"):
        del tree[part]["*"]
    del tree["in_force"]["to_come"]
    host.memory = type(host.memory).from_json(tree)
    assert in_force(host.memory.in_force, host.memory.last, revision="sha256:0", generation=1).to_come == ()
    outcome = host.good(BASE | agent() | ALL, SIGNED)
    assert [layer.name for layer in force(outcome).to_come] == ["org"]


def test_the_plan_speaks_of_agents_to_come() -> None:
    host = Host()
    host.good(BASE | agent() | agent("two") | ALL, SIGNED)

    def told(files: dict[str, bytes]) -> str:
        outcome = Host(memory=host.memory).good(files, SIGNED)
        return "\n".join(plan(outcome, desired(files), revision="sha256:0").lines())

    narrowed = told(BASE | agent() | agent("two") | egress(agents=["helper", "two"], allow=["a.com"], deny=["b.com"]))
    assert "held     egress/org /agents (for agents to come): -*" in narrowed
    assert '- {document: egress/org, field: /agents, remove: "*"}' in narrowed
    assert "held     egress/org /agents (for two and those to come): -* -two" in told(
        BASE | agent() | agent("two") | egress(agents=["helper"], allow=["a.com"], deny=["b.com"])
    )
    assert "held     egress/org /agents (for 2 agents and those to come): -* -helper -two" in told(
        BASE | agent() | agent("two")
    )
