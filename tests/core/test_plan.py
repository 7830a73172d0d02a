"""What people and CI are told: changes, counterexamples, the statement to sign, and the exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.directions import NEVER_APPROVED, Leaf, find, order_of
from reconciler.core.findings import Step
from reconciler.core.grants import Action
from reconciler.core.memory import Memory
from reconciler.core.plan import ExitCode, Plan, emit_reason, plan
from reconciler.core.reconcile import reconcile
from reconciler.core.schema import load_schema
from reconciler.core.statement import Statement, read
from reconciler.core.validate import desired
from reconciler.core.written import grant_text, written
from tests.core.scene import ALICE, BOB, Host, agent, egress, platform, signed
from tests.strategies import directories

ON = ("platform", "/enabled", "value", True)
BASE = platform(enabled=True)


def planned(host: Host, files: dict[str, bytes], grants: object = ()) -> Plan:
    wanted = desired(files)
    outcome = reconcile(wanted, host.memory, grants, now=host.now)  # type: ignore[arg-type]  # tuples of grants
    return plan(outcome, wanted, revision="sha256:0")


def statement(missing: tuple[Step, ...], **more: str) -> str:
    fields = {
        "identifier": "CHG-9.1",
        "expires": "never",
        "ticket": "CHG-9",
        "reason": "the vendor moved its API",
        **more,
    }
    return emit_reason(
        missing,
        identifier=fields["identifier"],
        audience=["prod-*"],
        expires=fields["expires"],
        ticket=fields["ticket"],
        reason=fields["reason"],
    )


def test_the_exit_code_says_nothing_changes_problems_or_unsigned() -> None:
    host = Host()
    host.good(BASE, signed(ON))
    assert planned(host, BASE, signed(ON)).exit_code is ExitCode.NOTHING
    assert planned(host, platform(enabled=False), signed(ON)).exit_code is ExitCode.CHANGES
    assert planned(host, BASE | agent(allow=["a.com"]), signed(ON)).exit_code is ExitCode.UNSIGNED
    assert planned(host, BASE | {"agents/a.yaml": b"a: no\n"}, signed(ON)).exit_code is ExitCode.PROBLEMS
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3]


def test_a_weakening_is_told_with_a_counterexample_and_the_reason_that_covers_it() -> None:
    host = Host()
    host.good(BASE | agent(), signed(ON))
    grants = (*signed(ON), *signed(("agents/helper", "/allow", "add", "*.pypi.org"), identifier="CHG-7"))
    text = "\n".join(planned(host, BASE | agent(allow=["*.pypi.org"]), grants).lines())
    assert "weakens  agents/helper /allow: +*.pypi.org" in text
    assert "now reachable: x.pypi.org:443" in text
    assert "licensed by CHG-7 (alice)" in text


def test_a_held_change_is_told_with_units_and_its_missing_grant() -> None:
    text = "\n".join(planned(Host(), BASE | agent(limits={"memory": "1GiB", "timeout": "1h"}), signed(ON)).lines())
    assert "held     agents/helper /limits/memory: 512MiB -> 1GiB" in text
    assert "held     agents/helper /limits/timeout: 10m -> 1h" in text
    assert '- {document: agents/helper, field: /limits/memory, value: "1GiB"}' in text


def test_an_entry_with_a_labels_is_told_with_its_unicode_form() -> None:
    text = "\n".join(planned(Host(), BASE | agent(allow=["xn--xample-9ua.com"])).lines())
    assert "reads éxample.com" in text


def test_a_change_of_a_shared_layer_says_how_many_agents_it_concerns() -> None:
    files = BASE | agent("one") | agent("two") | egress(allow=["a.com"])
    text = "\n".join(planned(Host(), files).lines())
    assert "held     egress/org /allow (for 2 agents and those to come): +a.com" in text


def test_problems_alarms_unused_reasons_and_ignored_files_are_told() -> None:
    grants = signed(("agents/helper", "/allow", "add", "a.com"), identifier="CHG-OLD")
    told = planned(Host(), BASE | {"egress/org.yaml": b"x", "agents/a.bak": b""}, grants)
    text = "\n".join(told.lines())
    assert "problem  egress/org.yaml:1:1: /:" in text
    assert "alarm    nothing is loosened while egress/org has problems" in text
    assert "unused   CHG-OLD" in text
    assert "ignored  agents/a.bak" in text


def test_the_json_form_is_plain_and_writes_values_as_documents_do() -> None:
    told = planned(Host(), BASE | agent(allow=["*.a.com"], limits={"memory": "1GiB"}), signed(ON)).to_json()
    assert json.loads(json.dumps(told)) == told
    assert told["exit_code"] == 3
    assert {"document": "agents/helper", "field": "/limits/memory", "value": "1GiB"} in told["missing"]
    held = {one["field"]: one for one in told["held"]}
    assert (held["/limits/memory"]["after"], held["/limits/memory"]["wanted"]) == ("512MiB", "1GiB")
    assert held["/allow"]["steps"][0]["now_reachable"] == "x.a.com:443"
    (enabled,) = [change for change in told["changes"] if change["field"] == "/enabled"]
    assert enabled["weakening"]
    assert (enabled["reasons"], enabled["signers"], enabled["tickets"]) == (["CHG-1"], ["alice"], ["CHG-1"])


def test_the_emitted_statement_is_one_that_our_own_loader_reads_and_it_releases_everything() -> None:
    files = (
        BASE
        | agent(
            allow=["*.github.io", "db.example.com:5432", "a.com:80"],
            submitters=["svc"],
            env={"allow": ["INVOICE_ID"]},
            secrets={"API_KEY": {"file": "/etc/s/one"}},
            limits={"memory": "1536MiB", "cpus": 1.5, "pids": 1000},
            minimum_isolation="namespace",
        )
        | egress(default="allow", allow=["*.a.com"])
    )
    host = Host()
    text = statement(planned(host, files).missing)
    found = read("reasons/CHG-9.yaml", text.encode())
    assert isinstance(found, Statement), found
    assert (found.id, found.ticket, found.audience) == ("CHG-9.1", "CHG-9", ("prod-*",))
    outcome = host.good(files, found.approved((ALICE, BOB)))
    assert outcome.held == ()
    assert '# needs signatures of 2 people\n  - {document: agents/helper, field: /allow, add: "*.github.io"}' in text


def test_the_emitted_statement_lifts_layers_that_are_gone() -> None:
    host = Host()
    host.good(BASE | agent("one") | agent("two") | egress("org") | egress("team", agents=["one"]), signed(ON))
    missing = planned(host, BASE | agent("one") | agent("two"), signed(ON)).missing
    text = statement(missing)
    assert '- {document: egress/org, field: /agents, remove: "*"}' in text
    assert "- {document: egress/team, field: /agents, remove: one}" in text
    found = read("reasons/CHG-9.yaml", text.encode())
    assert isinstance(found, Statement)
    assert host.good(BASE | agent("one") | agent("two"), (*signed(ON), *found.approved((ALICE,)))).held == ()


@pytest.mark.parametrize(
    "text",
    [
        "CHG-1.10",
        "no",
        "1.10",
        "22:22",
        "null",
        "a: b",
        "#",
        'it\'s "quoted"',
        "naïve",
        "- x",
        "*",
        "true",
        "0x1f",
        "~",
    ],
)
def test_text_of_a_statement_is_text_whatever_yaml_would_make_of_it(text: str) -> None:
    step = Step(document="platform", field="/enabled", action=Action.VALUE, value=True)
    emitted = statement((step,), ticket=text, reason=f"{text} is why we need to do it")
    found = read("reasons/x.yaml", emitted.encode())
    assert isinstance(found, Statement), (found, emitted)
    assert found.ticket == text


@given(files=directories(), restart=st.booleans())
def test_the_missing_statement_of_a_new_host_releases_everything(files: dict[str, bytes], *, restart: bool) -> None:
    wanted = desired(files)
    first = reconcile(wanted, Memory(), (), now=0.0)
    told = plan(first, wanted, revision="sha256:0")
    if not told.missing:
        assert told.exit_code in (ExitCode.NOTHING, ExitCode.CHANGES)
        return
    found = read("reasons/x.yaml", statement(told.missing).encode())
    assert isinstance(found, Statement), found
    memory = first.memory if not restart else Memory()
    assert reconcile(wanted, memory, found.approved((ALICE, BOB)), now=0.0).held == ()


@pytest.mark.parametrize(
    ("grant", "text"),
    [
        (("agents/helper", "/limits/memory", "value", "1GiB"), "agents/helper /limits/memory value: 1GiB"),
        (("agents/helper", "/limits/timeout", "value", "90s"), "agents/helper /limits/timeout value: 90s"),
        (("platform", "/enabled", "value", True), "platform /enabled value: true"),
        (("egress/org", "/agents", "remove", "*"), "egress/org /agents remove: *"),
    ],
)
def test_a_grant_is_told_with_its_value_as_documents_write_it(grant: tuple[str, str, str, Any], text: str) -> None:
    assert [grant_text(one) for one in signed(grant)] == [text]


def test_a_field_that_is_never_approved_takes_no_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    order = find(order_of(load_schema("platform")), ("enabled",))
    assert isinstance(order, Leaf)
    never = replace(order, approvals=NEVER_APPROVED)
    monkeypatch.setattr("reconciler.core.statement.find", lambda *_: never)
    found = read("x.yaml", STATEMENT)
    assert isinstance(found, tuple)
    assert "is never loosened, whoever signs" in found[0].message


STATEMENT = b"""\
version: 1
kind: signed-reason
id: CHG-1.1
audience: ["*"]
expires: never
ticket: CHG-1
reason: needed for the tests of statements
grants:
  - {document: platform, field: /enabled, value: true}
"""


def test_whole_documents_are_told_as_they_are_written() -> None:
    host = Host()
    files = BASE | agent(limits={"memory": "256MiB", "timeout": "90s"}, secrets={"K": {"file": "/s/one"}})
    tree = host.good(files).tree["agents"]["helper"]["own"]
    told = written("agents/helper", "", tree)
    assert (told["limits"]["memory"], told["limits"]["timeout"], told["limits"]["cpus"]) == ("256MiB", "90s", 1)
    assert (told["user"], told["allow"]) == (tree["user"], tree["allow"])
    assert written("agents/helper", "/limits", tree["limits"]) == told["limits"]
    assert written("agents/helper", "/no/such/field", 512) == 512


@given(files=directories())
def test_what_is_told_of_an_agent_is_a_document_that_resolves_to_the_same(files: dict[str, bytes]) -> None:
    wanted = desired(files)
    for name, tree in wanted.documents.items():
        told = {key: value for key, value in written(name, "", tree).items() if value is not None}
        again = desired({f"{name}.yaml": json.dumps(told).encode()})
        assert again.documents.get(name, tree) == tree
        assert name == "platform" or name in again.documents
