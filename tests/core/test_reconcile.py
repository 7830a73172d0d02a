"""The formula, one consequence at a time: what tightens at once, what is held, what lapses and what comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reconciler.core.memory import Memory
from reconciler.core.policy import BackendChoice
from tests.core.scene import ALICE, BOB, Host, agent, allowed, effective, egress, force, missing, platform, signed

ON = ("platform", "/enabled", "value", True)
BASE = platform(enabled=True)


def vendor(host: str = "api.vendor.com") -> tuple[str, str, str, str]:
    return ("agents/helper", "/allow", "add", host)


def test_a_new_host_is_off_until_somebody_signs() -> None:
    host = Host()
    outcome = host.good(BASE)
    assert not force(outcome).platform.enabled
    assert missing(outcome) == [ON]
    outcome = host.good(BASE, signed(ON))
    assert force(outcome).platform.enabled
    assert outcome.held == ()
    (change,) = outcome.changes
    assert (change.document, change.field, change.before, change.after) == ("platform", "/enabled", False, True)
    assert change.weakening
    assert (change.grants, change.signers, change.tickets) == (("CHG-1",), ("alice",), ("CHG-1",))


def test_switching_off_needs_nobody() -> None:
    host = Host()
    host.good(BASE, signed(ON))
    outcome = host.good(platform(enabled=False), signed(ON))
    assert not force(outcome).platform.enabled
    assert [change.weakening for change in outcome.changes] == [False]


def test_an_unsigned_entry_is_held_and_named_with_what_it_would_reach() -> None:
    outcome = Host().good(BASE | agent(allow=["*.vendor.com"]))
    assert allowed(outcome) == []
    (held,) = [one for one in outcome.held if one.document == "agents/helper"]
    assert (held.field, held.before, held.after, held.wanted) == ("/allow", [], [], ["*.vendor.com"])
    assert held.steps[0].witness == "x.vendor.com:443"
    assert held.agents == ("helper",)


def test_an_entry_whose_order_is_right_is_licensed_by_a_wider_grant_but_only_for_its_ports() -> None:
    files = BASE | agent(allow=["files.pypi.org"])
    outcome = Host().good(files, signed(vendor("*.pypi.org:443")))
    assert allowed(outcome) == ["files.pypi.org:443"]
    assert missing(outcome) == [vendor("files.pypi.org:80"), ON]


def test_a_mixed_change_tightens_at_once_and_holds_only_what_loosens() -> None:
    host = Host()
    host.good(BASE | agent(allow=["old.com", "keep.com"]), signed(vendor("old.com"), vendor("keep.com")))
    outcome = host.good(BASE | agent(allow=["new.com", "keep.com"]), signed(vendor("old.com"), vendor("keep.com")))
    assert allowed(outcome) == ["keep.com"]
    assert vendor("new.com") in missing(outcome)


def test_replacing_one_host_by_another_unsigned_leaves_neither() -> None:
    host = Host()
    host.good(BASE | agent(allow=["old.com"]), signed(vendor("old.com")))
    assert allowed(host.good(BASE | agent(allow=["new.com"]), signed(vendor("old.com")))) == []


def test_one_agent_is_never_held_because_of_another() -> None:
    files = BASE | agent("one", allow=["a.com"]) | agent("two", allow=["b.com"])
    outcome = Host().good(files, signed(("agents/one", "/allow", "add", "a.com")))
    assert allowed(outcome, "one") == ["a.com"]
    assert allowed(outcome, "two") == []


def test_a_grant_counts_for_the_agent_that_it_names_and_no_other() -> None:
    outcome = Host().good(BASE | agent("two", allow=["a.com"]), signed(("agents/one", "/allow", "add", "a.com")))
    assert allowed(outcome, "two") == []
    assert outcome.unused == ("CHG-1",)


def test_a_deny_entry_stays_until_a_grant_covers_all_of_it_and_comes_back_when_the_grant_ends() -> None:
    host = Host()
    host.good(BASE | agent(deny=["*.vendor.com"]))
    without = BASE | agent()
    assert [str(entry) for entry in effective(host.good(without)).agent.deny] == ["*.vendor.com"]
    narrow = signed(("agents/helper", "/deny", "remove", "x.vendor.com"))
    assert [str(entry) for entry in effective(host.good(without, narrow)).agent.deny] == ["*.vendor.com"]
    whole = signed(("agents/helper", "/deny", "remove", "*.vendor.com"), expires=host.now + 3600)
    outcome = host.good(without, whole)
    assert effective(outcome).agent.deny == ()
    assert [change.weakening for change in outcome.changes] == [True]
    host.now += 3600
    outcome = host.good(without, whole)
    assert [str(entry) for entry in effective(outcome).agent.deny] == ["*.vendor.com"]
    assert [change.weakening for change in outcome.changes] == [False]


def test_a_limit_that_was_ever_lower_stays_lower_until_a_grant_names_it() -> None:
    host = Host()
    host.good(BASE | agent(limits={"memory": "256MiB"}))
    outcome = host.good(BASE | agent(limits={"memory": "1GiB"}))
    assert effective(outcome).agent.limits.memory == 256 * 2**20
    grant = ("agents/helper", "/limits/memory", "value", "1GiB")
    assert grant in missing(outcome)
    outcome = host.good(BASE | agent(limits={"memory": "1GiB"}), signed(grant))
    assert effective(outcome).agent.limits.memory == 2**30
    outcome = host.good(BASE | agent(limits={"memory": "512MiB"}), signed(grant))
    assert effective(outcome).agent.limits.memory == 512 * 2**20, "a grant names the loosest value, not the only one"


def test_leaving_a_field_out_is_the_default_and_may_be_a_weakening() -> None:
    host = Host()
    host.good(BASE | agent(minimum_isolation="microvm"))
    outcome = host.good(BASE | agent())
    assert effective(outcome).agent.minimum_isolation == "microvm"
    assert ("agents/helper", "/minimum_isolation", "value", "container") in missing(outcome)


def test_leaving_a_named_backend_is_a_weakening() -> None:
    host = Host()
    host.good(platform(backend="docker"))
    outcome = host.good(platform())
    assert force(outcome).platform.backend is BackendChoice.DOCKER
    assert missing(outcome) == [("platform", "/backend", "value", "auto")]


@pytest.mark.parametrize(
    ("fields", "grant"),
    [
        ({"submitters": ["svc"]}, ("/submitters", "add", "svc")),
        ({"env": {"allow": ["A"]}}, ("/env/allow", "add", "A")),
        ({"limits": {"timeout": "1h"}}, ("/limits/timeout", "value", "1h")),
        ({"limits": {"output": "1MiB"}}, ("/limits/output", "value", "1MiB")),
        ({"limits": {"cpus": 1.5}}, ("/limits/cpus", "value", 1.5)),
        ({"minimum_isolation": "namespace"}, ("/minimum_isolation", "value", "namespace")),
        ({"secrets": {"API_KEY": {"file": "/etc/s"}}}, ("/secrets/API_KEY/file", "value", "/etc/s")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_each_field_of_an_agent_that_loosens_waits_for_its_grant(
    fields: dict[str, Any], grant: tuple[str, str, Any]
) -> None:
    host, files, whole = Host(), BASE | agent(**fields), ("agents/helper", *grant)
    first = host.good(files, signed(ON))
    assert missing(first) == [whole]
    outcome = host.good(files, signed(ON, whole))
    assert outcome.held == ()
    assert any(change.weakening and change.field.startswith(grant[0][:8]) for change in outcome.changes)


def test_image_user_and_description_change_without_a_signature() -> None:
    host = Host()
    host.good(BASE | agent(description="one"), signed(ON))
    outcome = host.good(BASE | agent(description="two", user=1000), signed(ON))
    assert (effective(outcome).agent.description, effective(outcome).agent.user) == ("two", 1000)
    assert outcome.held == ()
    assert not any(change.weakening for change in outcome.changes)


def test_a_secret_without_a_grant_is_left_out_and_another_file_blocks_the_agent() -> None:
    host = Host()
    one, two = BASE | agent(secrets={"K": {"file": "/s/one"}}), BASE | agent(secrets={"K": {"file": "/s/two"}})
    assert effective(host.good(one)).agent.secrets == {}
    grant = signed(("agents/helper", "/secrets/K/file", "value", "/s/one"))
    assert effective(host.good(one, grant)).agent.secrets == {"K": "/s/one"}
    outcome = host.good(two, grant)
    assert effective(outcome).blocked == ("/secrets/K/file",)
    assert ("agents/helper", "/secrets/K/file", "value", "/s/two") in missing(outcome)


def test_a_layer_starts_empty_and_its_entries_wait_like_an_agents() -> None:
    files = BASE | agent(allow=["a.com"]) | egress(allow=["a.com"])
    host = Host()
    outcome = host.good(files, signed(ON, ("agents/helper", "/allow", "add", "a.com")))
    (layer,) = effective(outcome).layers
    assert layer.allow == ()
    assert missing(outcome) == [("egress/org", "/allow", "add", "a.com")]


def layer_of(*agents: str) -> dict[str, bytes]:
    return egress(agents=agents, allow=["a.com"], deny=["b.com"], deny_ranges=["161.26.0.0/16"])


LAYER = layer_of("*")
LAYER_SIGNED = signed(ON, ("egress/org", "/allow", "add", "a.com"))


@pytest.mark.parametrize(
    "after",
    [
        pytest.param({}, id="deleted"),
        pytest.param(egress("renamed", allow=["a.com"]), id="renamed"),
        pytest.param(egress(agents=[], allow=["a.com"]), id="emptied of every agent"),
        pytest.param(egress(agents=["other"], allow=["a.com"]), id="narrowed to another agent"),
    ],
)
@pytest.mark.parametrize(("scope", "lifted"), [("helper", "helper"), ("*", "*")], ids=["of one agent", "of all"])
def test_a_layer_that_goes_away_stays_as_it_was_until_a_grant_lifts_it(
    after: dict[str, bytes], scope: str, lifted: str
) -> None:
    host = Host()
    before = host.good(BASE | agent() | layer_of(scope), LAYER_SIGNED)
    outcome = host.good(BASE | agent() | after, LAYER_SIGNED)
    (layer,) = [layer for layer in effective(outcome).layers if layer.name == "org"]
    assert (layer,) == effective(before).layers
    grant = ("egress/org", "/agents", "remove", lifted)
    assert grant in missing(outcome)
    outcome = host.good(BASE | agent() | after, (*LAYER_SIGNED, *signed(grant)))
    assert [layer.name for layer in effective(outcome).layers if layer.name == "org"] == []
    (change,) = [one for one in outcome.changes if one.document == "egress/org"]
    assert (change.field, change.after, change.weakening) == ("/agents", [], True)
    assert change.before == (["helper"] if lifted == "helper" else ["*", "helper"])
    outcome = host.good(BASE | agent() | after, LAYER_SIGNED)
    assert [one.name for one in effective(outcome).layers if one.name == "org"] == ["org"], "the grant ended"


def test_a_deleted_layer_of_all_agents_is_lifted_by_one_grant() -> None:
    host = Host()
    host.good(BASE | agent("one") | agent("two") | egress())
    outcome = host.good(BASE | agent("one") | agent("two"))
    assert [effective(outcome, name).layers[0].name for name in ("one", "two")] == ["org", "org"]
    grant = ("egress/org", "/agents", "remove", "*")
    assert grant in missing(outcome)
    outcome = host.good(BASE | agent("one") | agent("two"), signed(grant))
    assert [effective(outcome, name).layers for name in ("one", "two")] == [(), ()]


def test_a_grant_for_a_layer_that_is_gone_cannot_widen_what_it_was() -> None:
    host = Host()
    wide = signed(("egress/org", "/allow", "add", "*.a.com"))
    host.good(BASE | agent() | egress(allow=["x.a.com"]), wide)
    (layer,) = effective(host.good(BASE | agent(), wide)).layers
    assert [str(entry) for entry in layer.allow] == ["x.a.com"]


def test_a_layer_that_loosens_in_place_is_held_field_by_field() -> None:
    host = Host()
    host.good(BASE | agent() | LAYER, LAYER_SIGNED)
    outcome = host.good(BASE | agent() | egress(default="allow", allow=["a.com", "c.com"]), LAYER_SIGNED)
    (layer,) = effective(outcome).layers
    assert not layer.default_allow
    assert [str(entry) for entry in layer.allow] == ["a.com"]
    assert [str(entry) for entry in layer.deny] == ["b.com"]
    assert layer.deny_ranges == ("161.26.0.0/16",)
    assert missing(outcome) == [
        ("egress/org", "/allow", "add", "c.com"),
        ("egress/org", "/default", "value", "allow"),
        ("egress/org", "/deny", "remove", "b.com"),
        ("egress/org", "/deny_ranges", "remove", "161.26.0.0/16"),
    ]


def test_a_new_layer_tightens_at_once_for_the_agents_that_it_selects() -> None:
    host = Host()
    host.good(BASE | agent("one") | agent("two"), signed(ON))
    outcome = host.good(BASE | agent("one") | agent("two") | egress(agents=["one"]), signed(ON))
    assert [layer.name for layer in effective(outcome, "one").layers] == ["org"]
    assert effective(outcome, "two").layers == ()
    assert [(one.document, one.field, one.weakening, one.agents) for one in outcome.changes] == [
        ("egress/org", "/agents", False, ("one",))
    ]


def test_one_finding_of_a_shared_layer_is_told_once_for_all_its_agents() -> None:
    outcome = Host().good(BASE | agent("one") | agent("two") | egress(allow=["a.com"]), signed(ON))
    (held,) = outcome.held
    assert (held.document, held.field, held.agents) == ("egress/org", "/allow", ("*", "one", "two"))


def test_only_the_lapsed_statements_elements_lapse() -> None:
    host = Host()
    files = BASE | agent(allow=["a.com", "b.com"])
    first = signed(vendor("a.com"), identifier="CHG-1", expires=2000.0)
    second = signed(vendor("b.com"), identifier="CHG-2")
    assert allowed(host.good(files, first + second)) == ["a.com", "b.com"]
    host.now = 1999.9
    assert allowed(host.good(files, first + second)) == ["a.com", "b.com"]
    host.now = 2000.0
    outcome = host.good(files, first + second)
    assert allowed(outcome) == ["b.com"]
    assert [(change.field, change.weakening) for change in outcome.changes] == [("/allow", False)]


def test_a_statement_that_is_deleted_and_put_back_applies_again() -> None:
    host, files, grants = Host(), BASE | agent(allow=["a.com"]), signed(vendor("a.com"))
    host.good(files, grants)
    assert allowed(host.good(files)) == []
    assert allowed(host.good(files, grants)) == ["a.com"]


def test_an_agent_that_is_deleted_is_gone_at_once_and_live_grants_apply_when_it_comes_back() -> None:
    host, files, grants = Host(), BASE | agent(allow=["a.com"], deny=["b.com"]), signed(ON, vendor("a.com"))
    host.good(files, grants)
    outcome = host.good(BASE, grants)
    assert force(outcome).agents == {}
    (change,) = outcome.changes
    assert (change.document, change.field, change.after, change.weakening) == ("agents/helper", "", None, False)
    outcome = host.good(BASE | agent(allow=["a.com"]), grants)
    assert allowed(outcome) == ["a.com"]
    assert [str(entry) for entry in effective(outcome).agent.deny] == ["b.com"], "an absent agent leaves the baseline"


def test_grants_do_not_carry_over_to_another_name() -> None:
    host = Host()
    host.good(BASE | agent(allow=["a.com"]), signed(vendor("a.com")))
    assert allowed(host.good(BASE | agent("renamed", allow=["a.com"]), signed(vendor("a.com"))), "renamed") == []


@pytest.mark.parametrize("files", [{}, {"README": b""}, {"reasons/a.yaml": b"x"}], ids=["missing", "others", "reasons"])
def test_a_directory_without_documents_keeps_what_is_in_force_and_alarms(files: dict[str, bytes]) -> None:
    host = Host()
    grants = signed(ON, vendor("a.com"))
    before = host.good(BASE | agent(allow=["a.com"]) | egress(), grants)
    outcome = host.run(files)
    assert outcome.alarm is not None
    assert outcome.tree == before.tree
    assert outcome.changes == ()


def test_a_grant_expires_and_a_statement_is_revoked_while_the_directory_is_missing() -> None:
    host, files = Host(), BASE | agent(allow=["a.com", "b.com"])
    host.good(files, signed(vendor("a.com"), expires=2000.0) + signed(vendor("b.com"), identifier="CHG-2"))
    host.now = 2000.0
    assert allowed(host.run({})) == ["b.com"]
    assert allowed(host.run({}, lapsed=frozenset({"CHG-2"}))) == []
    assert allowed(host.run({})) == [], "what lapsed is not remembered"


def test_a_new_host_with_an_empty_directory_has_nothing_in_force() -> None:
    outcome = Host().run({})
    assert not force(outcome).platform.enabled
    assert force(outcome).agents == {}


BROKEN = b"version: 1\nkind: agent\nname: helper\nallow: [\n"


def test_a_bad_agent_document_keeps_that_agents_last_content_and_others_go_on() -> None:
    host = Host()
    grants = signed(vendor("a.com"), ("agents/other", "/allow", "add", "b.com"))
    host.good(BASE | agent(allow=["a.com"]) | agent("other"), grants)
    outcome = host.run(BASE | {"agents/helper.yaml": BROKEN} | agent("other", allow=["b.com"]), grants)
    assert allowed(outcome) == ["a.com"]
    assert allowed(outcome, "other") == ["b.com"]
    assert outcome.alarm is None
    outcome = host.run(BASE | {"agents/helper.yaml": BROKEN} | agent("other"), ())
    assert allowed(outcome) == [], "it is still clipped by the formula"


def test_a_bad_document_of_an_agent_that_was_never_seen_is_no_agent() -> None:
    assert force(Host().run(BASE | {"agents/helper.yaml": BROKEN})).agents == {}


@pytest.mark.parametrize(
    "bad",
    [{"platform.yaml": b"version: 2\n"}, {"egress/org.yaml": b"agents: no"}, {"egress/new.yaml": b"x"}],
    ids=["platform", "an egress document", "an egress document that was never seen"],
)
def test_a_bad_platform_or_egress_document_holds_all_loosening_and_nothing_else(bad: dict[str, bytes]) -> None:
    host = Host()
    grants = signed(ON, vendor("a.com"), vendor("b.com"))
    host.good(BASE | agent(allow=["a.com"]) | egress(), grants)
    outcome = host.run(BASE | agent(allow=["b.com"]) | agent("new") | egress() | bad, grants)
    assert outcome.alarm is not None
    assert force(outcome).platform.enabled
    assert allowed(outcome) == []
    assert set(force(outcome).agents) == {"helper"}
    assert {(held.document, held.field) for held in outcome.held} == {("agents/helper", "/allow"), ("agents/new", "")}
    assert missing(outcome) == [], "nothing has to be signed: the problem has to be mended"
    outcome = host.run(BASE | agent(allow=["b.com"]) | agent("new") | egress(), grants)
    assert allowed(outcome) == ["b.com"]
    assert set(force(outcome).agents) == {"helper", "new"}


def test_a_bad_egress_document_holds_a_signed_loosening_of_the_platform_too() -> None:
    host = Host()
    host.good(BASE | egress())
    bad = {"egress/org.yaml": b"x"}
    outcome = host.run(BASE | bad, signed(ON))
    assert not force(outcome).platform.enabled
    assert [(held.document, held.field) for held in outcome.held] == [("platform", "/enabled")]
    assert force(host.run(BASE | egress(), signed(ON))).platform.enabled


def test_a_grant_that_lifts_a_layer_from_one_agent_leaves_it_on_the_others() -> None:
    host = Host()
    host.good(BASE | agent("one") | agent("two") | egress())
    outcome = host.good(BASE | agent("one") | agent("two"), signed(("egress/org", "/agents", "remove", "one")))
    assert effective(outcome, "one").layers == ()
    assert [layer.name for layer in effective(outcome, "two").layers] == ["org"]
    assert ("egress/org", "/agents", "remove", "*") in missing(outcome), "of two and of the agents to come"
    host = Host()
    host.good(BASE | agent("one") | agent("two") | egress(agents=["one", "two"]))
    outcome = host.good(BASE | agent("one") | agent("two"), signed(("egress/org", "/agents", "remove", "one")))
    assert ("egress/org", "/agents", "remove", "two") in missing(outcome), "of agents to come nothing was ever said"


def test_a_grant_that_lifts_a_layer_changes_nothing_while_the_document_still_selects_the_agent() -> None:
    files = BASE | agent() | egress(allow=["a.com"])
    outcome = Host().good(files, signed(("egress/org", "/agents", "remove", "*")))
    (layer,) = effective(outcome).layers
    assert layer.allow == ()


def test_a_missing_platform_document_beside_others_is_a_problem_and_keeps_the_last() -> None:
    host = Host()
    host.good(BASE | agent(), signed(ON))
    outcome = host.run(agent(), signed(ON))
    assert force(outcome).platform.enabled
    assert outcome.alarm is not None


def test_a_wildcard_below_which_anybody_can_register_needs_two_people() -> None:
    files = BASE | agent(allow=["*.github.io"])
    grant = vendor("*.github.io")
    host = Host()
    assert allowed(host.good(files, signed(grant))) == []
    twice = (ALICE, type(ALICE)("alice", "SHA256:another"))
    assert allowed(host.good(files, signed(grant, by=twice))) == [], "one person with two keys is one"
    same_key = (ALICE, type(ALICE)("mallory", ALICE.key))
    assert allowed(host.good(files, signed(grant, by=same_key))) == [], "one key under two names is one"
    first, second = signed(grant), signed(grant, identifier="CHG-2", by=(BOB,))
    assert allowed(host.good(files, first + second)) == [], "both sign one statement"
    assert allowed(host.good(files, signed(grant, by=(ALICE, BOB)))) == ["*.github.io"]


def test_a_statement_that_nothing_depends_on_is_listed() -> None:
    grants = signed(vendor("a.com")) + signed(vendor("z.com"), identifier="CHG-2")
    outcome = Host().good(BASE | agent(allow=["a.com"]), grants)
    assert outcome.unused == ("CHG-2",)
    assert effective(outcome).reasons == ("CHG-1",)


def test_a_run_depends_on_the_reasons_of_the_agent_its_layers_and_the_platform() -> None:
    grants = (
        *signed(ON, identifier="P"),
        *signed(vendor("a.com"), identifier="A"),
        *signed(("egress/org", "/allow", "add", "a.com"), identifier="E"),
        *signed(("agents/other", "/allow", "add", "a.com"), identifier="O"),
    )
    files = BASE | agent(allow=["a.com"]) | agent("other", allow=["a.com"]) | egress(agents=["helper"], allow=["a.com"])
    outcome = Host().good(files, grants)
    assert effective(outcome).reasons == ("A", "E", "P")
    assert effective(outcome, "other").reasons == ("O", "P")


def test_the_held_set_is_reported_as_changed_only_when_it_changes() -> None:
    host = Host()
    assert not host.good(BASE, signed(ON)).held_changed
    assert host.good(BASE | agent(allow=["a.com"]), signed(ON)).held_changed
    assert not host.good(BASE | agent(allow=["a.com"], description="x"), signed(ON)).held_changed
    assert host.good(BASE | agent(allow=["b.com"]), signed(ON)).held_changed
    assert host.good(BASE | agent(), signed(ON)).held_changed


def test_hosts_that_skip_commits_and_new_hosts_agree_where_the_default_is_the_minimum() -> None:
    grants = signed(ON, vendor("a.com"), vendor("b.com"))
    last = BASE | agent(allow=["b.com", "c.com"])
    slow, new = Host(), Host()
    slow.good(BASE | agent(allow=["a.com"]), grants)
    slow.good(BASE | agent(allow=["a.com", "b.com"]), grants)
    assert slow.good(last, grants).tree == new.good(last, grants).tree


def test_a_default_that_an_upgrade_loosens_is_held_like_any_other_change() -> None:
    host = Host()
    host.good(BASE | agent())
    tree = host.memory.to_json()
    for content in tree["contents"].values():
        if "limits" in content:
            content["limits"]["pids"] = 100  # the default of an older version
    host.memory = Memory.from_json(tree)
    outcome = host.good(BASE | agent())
    assert effective(outcome).agent.limits.pids == 100
    assert ("agents/helper", "/limits/pids", "value", 256) in missing(outcome)


def test_a_field_that_an_older_version_did_not_have_starts_at_its_default() -> None:
    host = Host()
    host.good(BASE | agent(limits={"pids": 16}))
    tree = host.memory.to_json()
    for content in tree["contents"].values():
        content.pop("limits", None)
    host.memory = Memory.from_json(tree)
    assert effective(host.good(BASE | agent(limits={"pids": 16}))).agent.limits.pids == 16


def test_what_nobody_wrote_is_no_memory() -> None:
    for broken in ({}, {"version": 2}, None, {**Memory().to_json(), "contents": None, "last": {"a": "b"}}):
        with pytest.raises(ValueError, match="the state"):
            Memory.from_json(broken)
    assert Memory.from_json(Memory().to_json()) == Memory()


def test_a_grant_is_the_same_after_the_state_file() -> None:
    (grant,) = signed(vendor("a.com"), by=(ALICE, BOB), expires=5.0)
    memory = Memory(grants=(grant, *signed(vendor("b.com"), ON, identifier="CHG-2")))
    assert Memory.from_json(json.loads(json.dumps(memory.to_json()))) == memory
