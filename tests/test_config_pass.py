"""The config pipeline end to end on a real directory, with real signatures and a real audit log."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler import config_pass, config_rows
from reconciler import evaluate as evaluation
from reconciler.config_pass import snapshot_of, trust_of
from reconciler.core.audit import MOST_ROW, line_of
from reconciler.core.reconcile import Outcome
from reconciler.core.trust import NAMESPACE, TrustBroken
from reconciler.evaluate import evaluate
from reconciler.journal import JournalFailed
from reconciler.reason import Verifier
from reconciler.snapshot import NotSettled
from tests.estate import PLATFORM, Estate, agent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reconciler.core.audit import Event
    from reconciler.host import Host
    from reconciler.snapshot import Snapshot

ENABLE = {"document": "platform", "field": "/enabled", "value": True}
BACKEND = {"document": "platform", "field": "/backend", "value": "bubblewrap"}
ISOLATION = {"document": "agents/helper", "field": "/minimum_isolation", "value": "namespace"}


def add(entry: str, document: str = "agents/helper") -> dict[str, object]:
    return {"document": document, "field": "/allow", "add": entry}


@pytest.fixture
def fresh(tmp_path: Path) -> Estate:
    estate = Estate(tmp_path)
    estate.write(platform=PLATFORM, helper=agent(allow=["api.vendor.com"]))
    return estate


@pytest.fixture
def estate(fresh: Estate) -> Estate:
    """A host on which helper may reach api.vendor.com, by alice's signature."""
    fresh.reason(1, ENABLE, BACKEND, ISOLATION, add("api.vendor.com"))
    fresh.run()
    assert fresh.allows() == ["api.vendor.com"]
    return fresh


def test_the_first_enable_is_held_without_a_signed_reason(fresh: Estate) -> None:
    found = fresh.run()
    assert not fresh.enabled()
    assert fresh.allows() == []
    assert found.problems == ()
    held = fresh.rows("config.held")
    assert {"platform#/enabled", "agents/helper#/allow"} <= {str(row["object"]) for row in held}
    assert all(row["weakening"] and row["actor"] == "unsigned" for row in held)


def test_the_first_enable_is_applied_with_a_signed_reason(estate: Estate) -> None:
    assert estate.enabled()
    update = next(row for row in estate.rows("config.update") if row["object"] == "platform#/enabled")
    assert (update["before"], update["after"], update["weakening"]) == (False, True, True)
    assert (update["actor"], update["outcome"]) == ("alice", "applied")
    assert isinstance(update["detail"], dict)
    assert update["detail"]["tickets"] == ["CHG-1"]
    assert update["detail"]["reasons"] == ["CHG-1.1"]
    admitted = estate.rows("reason.admitted")
    assert [(row["object"], row["actor"]) for row in admitted] == [("CHG-1.1", "alice")]


def test_adding_a_host_is_held_until_it_is_signed_and_the_row_says_everything(estate: Estate) -> None:
    estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    estate.run()
    assert estate.allows() == ["api.vendor.com"]
    held = estate.rows("config.held")[-1]
    assert held["object"] == "agents/helper#/allow"
    assert held["before"] == ["api.vendor.com"]
    assert held["after"] == ["api.vendor.com", "new.vendor.com"]
    assert "new.vendor.com" in str(held["message"])
    estate.reason(2, add("new.vendor.com"), by=["bob"])
    estate.run()
    assert estate.allows() == ["api.vendor.com", "new.vendor.com"]
    update = estate.rows("config.update")[-1]
    assert (update["actor"], update["weakening"]) == ("bob", True)
    assert (update["before"], update["after"]) == (["api.vendor.com"], ["api.vendor.com", "new.vendor.com"])
    assert isinstance(update["detail"], dict)
    assert update["detail"]["tickets"] == ["CHG-2"]
    assert estate.rows("config.held")[-1]["outcome"] == "released"


def test_removing_a_host_applies_at_once_and_unsigned(estate: Estate) -> None:
    estate.write(helper=agent(allow=[]))
    estate.run()
    assert estate.allows() == []
    update = estate.rows("config.update")[-1]
    assert (update["actor"], update["weakening"], update["after"]) == ("unsigned", False, [])


def test_a_mixed_change_tightens_at_once_and_holds_the_rest(estate: Estate) -> None:
    estate.write(helper=agent(allow=["new.vendor.com"]))
    estate.run()
    assert estate.allows() == []
    assert estate.rows("config.held")[-1]["object"] == "agents/helper#/allow"


def test_a_second_pass_over_the_same_directory_writes_nothing(estate: Estate) -> None:
    count, generation = len(estate.rows()), estate.config.in_force
    before = (estate.root / "state" / "state.json").stat().st_mtime_ns
    found = estate.run()
    assert tuple(found.events) == ()
    assert not found.stale
    assert len(estate.rows()) == count
    assert estate.config.in_force == generation
    assert (estate.root / "state" / "state.json").stat().st_mtime_ns == before


def test_rows_tell_values_as_documents_write_them(estate: Estate) -> None:
    estate.write(helper=agent(limits="{memory: 1GiB, timeout: 1h, pids: 16}"))
    estate.run()
    held = {row["object"]: row for row in estate.rows("config.held")}
    memory = held["agents/helper#/limits/memory"]
    assert (memory["before"], memory["after"]) == ("512MiB", "1GiB")
    assert memory["message"] == "waits for a signed reason that grants agents/helper#/limits/memory value 1GiB"
    timeout = held["agents/helper#/limits/timeout"]
    assert (timeout["before"], timeout["after"]) == ("10m", "1h")
    estate.write(new=agent("new", limits="{memory: 256MiB}"), helper=None)
    estate.run()
    rows = {row["object"]: row for row in estate.rows("config.update")}
    new = rows["agents/new"]["after"]
    assert isinstance(new, dict)
    assert (new["limits"]["memory"], new["limits"]["timeout"]) == ("256MiB", "10m")
    gone = rows["agents/helper"]["before"]
    assert isinstance(gone, dict)
    assert gone["limits"]["memory"] == "512MiB"


@pytest.fixture
def foreign_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The farthest zone that there is, for the whole process."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Pacific/Kiritimati")
        time.tzset()
        assert time.timezone < -13 * 3600
        yield
    time.tzset()


@pytest.mark.usefixtures("foreign_zone")
@pytest.mark.parametrize(
    ("later", "counts"),
    [(3599, True), (3600, False), (3601, False)],
    ids=["before", "at it", "after"],
)
@pytest.mark.parametrize("what", ["statement", "signer"])
def test_an_end_is_utc_and_exact_wherever_the_daemon_thinks_it_is(
    what: str, later: int, counts: bool, estate: Estate
) -> None:
    if what == "statement":
        estate.reason(2, add("new.vendor.com"), expires="2026-06-01T13:00:00Z")
    else:
        estate.clock.turn(seconds=later)  # a signer's end counts when a statement is first seen
        ends = 'namespaces="governance.weaken@ringfence.v1",valid-before="20260601130000Z"'
        estate.trust("alice", options=ends)
        estate.reason(2, add("new.vendor.com"))
    estate.write(helper=agent(allow=["new.vendor.com"]))
    first = estate.run()
    if what == "statement":
        assert estate.allows() == ["new.vendor.com"]
        assert first.expiry == datetime(2026, 6, 1, 13, tzinfo=UTC)
        estate.clock.turn(seconds=later)
        estate.restart()
        estate.run()
    assert estate.allows() == (["new.vendor.com"] if counts else [])


def test_what_is_held_is_told_once_and_again_only_when_it_changes(estate: Estate) -> None:
    estate.write(helper=agent(allow=["api.vendor.com", "a.vendor.com"]))
    estate.run()
    count = len(estate.rows("config.held"))
    estate.run()
    estate.restart()
    estate.run()
    assert len(estate.rows("config.held")) == count
    estate.write(helper=agent(allow=["api.vendor.com", "b.vendor.com"]))
    estate.run()
    assert len(estate.rows("config.held")) == count + 1


def test_an_expired_reason_lapses_and_says_when_it_is_due(estate: Estate) -> None:
    estate.reason(2, add("new.vendor.com"), expires="2026-06-01T13:00:00Z")
    estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    found = estate.run()
    assert estate.allows() == ["api.vendor.com", "new.vendor.com"]
    assert found.wake is not None
    assert found.wake.isoformat() == "2026-06-01T13:00:00+00:00"
    assert found.expiring == ("CHG-2.1",)
    estate.clock.time = found.wake
    estate.run()
    assert estate.allows() == ["api.vendor.com"]
    lapsed = estate.rows("reason.lapsed")
    assert [(row["object"], row["code"], row["actor"]) for row in lapsed] == [("CHG-2.1", "expired", "alice")]


def test_a_clock_set_back_revives_nothing_not_even_after_a_restart(estate: Estate) -> None:
    estate.reason(2, add("new.vendor.com"), expires="2026-06-01T13:00:00Z")
    estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    estate.run()
    estate.clock.turn(hours=2)
    estate.run()
    estate.clock.turn(hours=-2)
    estate.run()
    assert estate.allows() == ["api.vendor.com"]
    estate.restart()
    estate.run()
    assert estate.allows() == ["api.vendor.com"]
    assert [row["object"] for row in estate.rows("reason.lapsed")] == ["CHG-2.1"]


def test_a_restart_keeps_what_is_in_force_and_writes_nothing_more(estate: Estate) -> None:
    before, count = estate.config.in_force, len(estate.rows())
    estate.restart()
    assert estate.config.in_force == before
    estate.run()
    assert estate.config.in_force == before
    assert len(estate.rows()) == count


@pytest.mark.parametrize("what", ["id", "key"])
def test_a_revoked_reason_lapses_at_the_next_pass(what: str, estate: Estate) -> None:
    name = "CHG-1.1" if what == "id" else estate.keys["alice"].fingerprint
    estate.trust("alice", "bob", revoked=f"{what} {name}\n")
    estate.run()
    assert estate.allows() == []
    assert not estate.enabled()
    assert [row["code"] for row in estate.rows("reason.lapsed")] == [f"{what}_revoked"]
    trust = estate.rows("trust.update")[-1]
    assert trust["weakening"] is False


def test_a_deleted_reason_lapses(estate: Estate) -> None:
    estate.unreason(1)
    estate.run()
    assert estate.allows() == []
    assert [row["code"] for row in estate.rows("reason.lapsed")] == ["removed"]


def test_a_statement_changed_by_one_byte_counts_no_more(estate: Estate) -> None:
    path = estate.root / "policy" / "reasons" / "CHG-1.yaml"
    path.write_bytes(path.read_bytes().replace(b"invoice", b"Invoice"))
    estate.run()
    assert estate.allows() == []
    refused = estate.rows("reason.refused")
    assert [(row["object"], row["code"]) for row in refused] == [("reasons/CHG-1.alice.sig", "bad_signature")]
    estate.run()
    assert len(estate.rows("reason.refused")) == 1, "told once"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        pytest.param({"expires": "2026-06-01T12:00:00Z"}, "expired", id="it has expired"),
        pytest.param({"expires": "never"}, "no_end", id="it never ends on a host that caps"),
        pytest.param({"expires": "2029-01-01T00:00:00Z"}, "too_long", id="it ends later than the host's cap"),
        pytest.param({"expires": "2026-12-31T00:00:00+01:00"}, "bad_statement", id="its end is not in UTC"),
        pytest.param({"ticket": "incident 7"}, "ticket", id="its ticket is none"),
        pytest.param({"reason": "CHG-2 CHG-2 CHG-2"}, "bad_statement", id="it says nothing but the ticket"),
        pytest.param({"id": "two words"}, "bad_statement", id="its id is none"),
        pytest.param({"kind": "agent"}, "bad_statement", id="it is something else"),
    ],
)
def test_a_well_signed_statement_that_says_the_wrong_thing_is_refused(
    fields: dict[str, str], code: str, tmp_path: Path
) -> None:
    estate = Estate(tmp_path, settings="max_age: 365d\n")
    estate.write(platform=PLATFORM, helper=agent(allow=["api.vendor.com"]))
    estate.reason(2, add("api.vendor.com"), **fields)
    estate.run()
    assert [row["code"] for row in estate.rows("reason.refused")] == [code]
    assert estate.allows() == []


@pytest.mark.parametrize(
    "grant",
    [
        pytest.param({**add("a.com"), "remove": "b.com"}, id="two actions"),
        pytest.param({"document": "agents/helper", "field": "/allow"}, id="no action"),
        pytest.param({"document": "agents/helper", "field": "/allow", "remove": "a.com"}, id="the wrong direction"),
        pytest.param({"document": "agents/helper", "field": "/nothing", "add": "a.com"}, id="no such field"),
        pytest.param({"document": "agents/helper", "field": "/image", "value": "host"}, id="a field without an order"),
        pytest.param({"document": "agents/helper", "field": "/limits/memory", "value": "lots"}, id="no size"),
        pytest.param({"document": "platform", "field": "/enabled", "value": "true"}, id="text for a boolean"),
        pytest.param({"document": "platform", "field": "/backend", "value": "qemu"}, id="no such choice"),
        pytest.param({"document": "agents/helper", "field": "/limits/memory", "value": "1B"}, id="too small a size"),
        pytest.param({"document": "agents/helper", "field": "/limits/pids", "value": 10**9}, id="too large a number"),
        pytest.param({"document": "agents/helper", "field": "/limits/cpus", "value": 0}, id="too small a number"),
        pytest.param(add("*"), id="a bare wildcard"),
        pytest.param(add("10.0.0.1"), id="an address"),
        pytest.param(add("a.com", "reasons/CHG-1"), id="no such document"),
    ],
)
def test_a_grant_that_means_nothing_refuses_the_whole_statement(grant: dict[str, object], fresh: Estate) -> None:
    fresh.reason(2, ENABLE, grant)
    fresh.run()
    assert [row["code"] for row in fresh.rows("reason.refused")] == ["bad_statement"]
    assert not fresh.enabled()


def test_a_statement_for_other_hosts_is_left_alone(fresh: Estate) -> None:
    path = fresh.reason(2, ENABLE)
    path.write_text(path.read_text().replace("prod-*", "test-*"))
    path.with_suffix(".alice.sig").write_bytes(fresh.keys["alice"].sign(path.read_bytes()))
    found = fresh.run()
    assert found.admissions.elsewhere == ("reasons/CHG-2.yaml",)
    assert fresh.rows("reason") == []
    assert not fresh.enabled()


def test_an_unsigned_statement_is_never_parsed(fresh: Estate) -> None:
    (fresh.root / "policy" / "reasons" / "CHG-2.yaml").write_bytes(b"\xff{{{ not yaml")
    found = fresh.run()
    assert [one.code for one in found.admissions.refused] == ["no_signature"]


def test_two_statements_with_one_id_both_count_for_nothing(estate: Estate) -> None:
    estate.reason(2, add("new.vendor.com"), id="CHG-1.1", by=["bob"])
    found = estate.run()
    assert [one.code for one in found.admissions.refused] == ["duplicate_id", "duplicate_id"]
    assert not estate.enabled()


def test_a_signature_without_its_statement_is_said(estate: Estate) -> None:
    (estate.root / "policy" / "reasons" / "CHG-9.alice.sig").write_bytes(b"x")
    found = estate.run()
    assert [(one.file, one.code) for one in found.admissions.refused] == [("reasons/CHG-9.alice.sig", "no_statement")]


def test_a_second_signer_joins_the_first(estate: Estate) -> None:
    path = estate.root / "policy" / "reasons" / "CHG-1.yaml"
    path.with_suffix(".bob.sig").write_bytes(estate.keys["bob"].sign(path.read_bytes()))
    found = estate.run()
    assert [approval.signer for approval in found.admissions.admitted[0].approvals] == ["alice", "bob"]
    assert [row["actor"] for row in estate.rows("reason.admitted")] == ["alice", "bob"]


def test_a_leaver_keeps_running_hosts_running_and_a_fresh_host_would_not_admit_it(estate: Estate) -> None:
    until = f'namespaces="{NAMESPACE}",valid-before="20260701Z"'
    estate.trust("alice", options=until)
    estate.run()
    estate.clock.turn(days=60)
    found = estate.run()
    assert estate.allows() == ["api.vendor.com"]
    assert found.inherited == ("CHG-1.1",)
    estate.reason(2, add("new.vendor.com"))
    estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    estate.run()
    assert estate.allows() == ["api.vendor.com"]
    assert estate.rows("reason.refused")[-1]["code"] == "signer_expired"


@pytest.mark.parametrize("way", ["missing", "emptied", "not ours", "only reasons"])
def test_an_empty_or_missing_directory_deletes_nothing(way: str, estate: Estate) -> None:
    policy = estate.root / "policy"
    if way == "only reasons":
        shutil.rmtree(policy / "agents")
        (policy / "platform.yaml").unlink()
    else:
        shutil.rmtree(policy)
    if way in {"emptied", "not ours"}:
        policy.mkdir()
    if way == "not ours":
        (policy / "README").write_text("x")
    before = estate.config.in_force
    found = estate.run()
    assert isinstance(found.snapshot, NotSettled)
    assert estate.config.in_force == before
    assert estate.enabled()
    assert [row["outcome"] for row in estate.rows("config.held")][-1] == "kept"
    count = len(estate.rows())
    estate.run()
    assert len(estate.rows()) == count


def test_while_the_directory_is_missing_reasons_still_expire_and_are_revoked(estate: Estate) -> None:
    estate.reason(2, add("new.vendor.com"), expires="2026-06-01T13:00:00Z", by=["bob"])
    estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    estate.run()
    shutil.rmtree(estate.root / "policy")
    estate.run()
    assert estate.allows() == ["api.vendor.com", "new.vendor.com"]
    estate.clock.turn(hours=2)
    estate.run()
    assert estate.allows() == ["api.vendor.com"]
    estate.trust("alice", "bob", revoked=f"key {estate.keys['alice'].fingerprint}\n")
    estate.run()
    assert estate.allows() == []
    assert [(row["object"], row["code"]) for row in estate.rows("reason.lapsed")] == [
        ("CHG-2.1", "expired"),
        ("CHG-1.1", "key_revoked"),
    ]


def test_one_bad_document_keeps_its_last_content_and_others_go_on(estate: Estate) -> None:
    estate.write(other=agent("other"), helper="{{{")
    found = estate.run()
    assert estate.allows() == ["api.vendor.com"]
    assert estate.config.in_force is not None
    assert "other" in estate.config.in_force.agents
    assert [problem.file for problem in found.problems] == ["agents/helper.yaml"]


def test_a_document_that_became_a_link_is_bad_and_not_gone(estate: Estate) -> None:
    path = estate.root / "policy" / "agents" / "helper.yaml"
    path.unlink()
    path.symlink_to("/etc/passwd")
    found = estate.run()
    assert estate.allows() == ["api.vendor.com"]
    assert ["not_a_file" in problem.message for problem in found.problems] == [True]


def test_a_broken_trust_file_admits_nothing_new_and_stops_nothing(estate: Estate) -> None:
    estate.reason(2, add("new.vendor.com"))
    estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    with (estate.root / "trust" / "allowed_signers").open("a") as file:
        file.write("* broken\n")
    found = estate.run()
    assert isinstance(found.trust, TrustBroken)
    assert found.alarm is not None
    assert "nothing new is admitted" in found.alarm
    assert str(found.problems[0]) not in found.alarm, "it is told among the problems"
    assert estate.allows() == ["api.vendor.com"]
    assert estate.rows("reason.refused")[-1]["code"] == "trust_broken"
    estate.trust("alice", revoked="nonsense\nid CHG-1.1\n")
    estate.run()
    assert estate.allows() == [], "a revocation that can be read counts beside a line that cannot"
    estate.trust("alice", "bob")
    estate.run()
    assert estate.allows() == ["api.vendor.com", "new.vendor.com"]


def test_signers_that_lie_in_the_policy_directory_are_nobodys(tmp_path: Path) -> None:
    estate = Estate(tmp_path)
    shutil.move(tmp_path / "trust", tmp_path / "policy" / "trust")
    (tmp_path / "trust").symlink_to("policy/trust")
    estate.write(platform=PLATFORM)
    estate.reason(1, ENABLE)
    found = estate.run()
    assert isinstance(found.trust, TrustBroken)
    assert "lies in the policy directory" in str(found.trust.problems[0])
    assert not estate.enabled()


def test_a_change_of_the_signers_is_told_and_listed_as_a_weakening_when_it_widens(estate: Estate) -> None:
    first = estate.rows("trust.update")
    assert len(first) == 1
    assert first[0]["weakening"] is True
    estate.trust("alice")
    estate.run()
    assert estate.rows("trust.update")[-1]["weakening"] is False
    estate.trust("alice", "bob")
    estate.run()
    last = estate.rows("trust.update")[-1]
    assert last["weakening"] is True
    assert isinstance(last["detail"], dict)
    assert "adds the signer bob" in last["detail"]["weakenings"][0]


def test_rows_come_before_the_state_and_without_rows_nothing_happens(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    estate.write(helper=agent(allow=[]))
    stored = (estate.root / "state" / "state.json").read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("reconciler.durable.os.write", full)
        with pytest.raises(JournalFailed):
            estate.run()
    assert (estate.root / "state" / "state.json").read_bytes() == stored
    assert estate.allows() == ["api.vendor.com"]
    estate.run()
    assert estate.allows() == []


def test_a_wiped_host_converges_from_the_directory_alone(estate: Estate) -> None:
    before = estate.config.in_force
    assert before is not None
    estate.journal.close()
    shutil.rmtree(estate.root / "state")
    estate._open()
    assert estate.allows() == []
    after = estate.run().in_force
    assert (after.platform, after.agents) == (before.platform, before.agents)


def test_the_generation_moves_with_what_is_in_force_and_with_nothing_else(estate: Estate) -> None:
    assert estate.config.in_force is not None
    first = estate.config.in_force.generation
    with (estate.root / "policy" / "platform.yaml").open("a") as file:
        file.write("# a comment\n")
    estate.run()
    assert estate.config.in_force.generation == first
    estate.write(helper=agent(allow=[]))
    estate.run()
    assert estate.config.in_force.generation == first + 1


def test_the_evaluation_alone_writes_nothing(fresh: Estate) -> None:
    fresh.reason(1, ENABLE)

    def marks() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in fresh.root.rglob("*")}

    before = marks()
    found = fresh.config._evaluate()
    assert isinstance(found.outcome, Outcome)
    assert found.events
    assert marks() == before


def test_the_commit_is_beside_the_actor(estate: Estate) -> None:
    git = estate.root / "policy" / ".git"
    git.mkdir()
    (git / "HEAD").write_text("a" * 40 + "\n")
    estate.write(helper=agent(allow=[]))
    estate.run()
    row = estate.rows("config.update")[-1]
    assert isinstance(row["detail"], dict)
    assert row["detail"]["commit"] == "a" * 40


def _git_file_with_nul(estate: Estate, _: pytest.MonkeyPatch) -> None:
    (estate.root / "policy" / ".git").write_bytes(b"gitdir: /x\0y\n")


def _policy_is_a_link_to_itself(estate: Estate, _: pytest.MonkeyPatch) -> None:
    (estate.root / "policy").rename(estate.root / "old")
    (estate.root / "policy").symlink_to("policy")


def _git_that_never_ends(estate: Estate, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(config_pass, "SETTLE_S", 0.1)
    (estate.root / "policy" / ".git").mkdir()
    (estate.root / "policy" / ".git" / "index.lock").touch()


def _documents_that_break_us(_: Estate, patch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise RecursionError

    patch.setattr(evaluation, "desired", breaks)


@pytest.mark.parametrize(
    "freeze", [_git_file_with_nul, _policy_is_a_link_to_itself, _git_that_never_ends, _documents_that_break_us]
)
@pytest.mark.parametrize("how", ["expired", "revoked"])
def test_no_content_of_the_directory_keeps_in_force_what_has_ended(
    freeze: Callable[[Estate, pytest.MonkeyPatch], None], how: str, estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze(estate, monkeypatch)
    if how == "expired":
        estate.clock.turn(days=365)
    else:
        estate.trust("alice", "bob", revoked="id CHG-1.1\n")
    estate.run()
    assert estate.allows() == []
    assert not estate.enabled()


def test_what_a_pass_takes_over_is_what_it_would_work_out(estate: Estate) -> None:
    """Over additions, tightenings, a bad document, a missing directory, expiry and a revocation."""

    def bad() -> None:
        estate.write(helper="{{{")

    def gone() -> None:
        (estate.root / "policy").rename(estate.root / "away")

    def back() -> None:
        (estate.root / "away").rename(estate.root / "policy")

    steps = (
        lambda: estate.write(other=agent("other", allow=["api.vendor.com"])),
        lambda: estate.reason(2, add("api.vendor.com", "agents/other"), expires="2026-06-01T13:00:00Z", by=["bob"]),
        lambda: estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"])),
        bad,
        gone,
        lambda: estate.clock.turn(hours=2),
        back,
        lambda: estate.write(helper=agent(allow=["api.vendor.com"])),
        lambda: estate.trust("alice", "bob", revoked="id CHG-1.1\n"),
    )
    for step in steps:
        step()
        snapshot, trust, state = snapshot_of(estate.host), trust_of(estate.host), estate.config._state
        now = estate.clock.now()
        whole = evaluate(snapshot, trust, state, now=now, host=estate.host, verifier=Verifier())
        found = estate.run()
        assert found.outcome == whole.outcome
        assert found.in_force == whole.in_force
        assert found.admissions == whole.admissions
        assert found.desired == whole.desired
        assert found.state == whole.state
        assert [row.object for row in found.events] == [row.object for row in whole.events]


def _expires(estate: Estate) -> None:
    estate.clock.turn(days=365)


def _is_revoked(estate: Estate) -> None:
    estate.trust("alice", "bob", revoked="id CHG-1.1\n")


ENDS = pytest.mark.parametrize("end", [_expires, _is_revoked])


def test_between_two_passes_nothing_is_done_while_nothing_ends(estate: Estate) -> None:
    before = estate.rows()
    assert not anyio.run(estate.config.keep_time)
    assert estate.rows() == before


@ENDS
def test_what_ends_is_taken_out_of_force_without_a_look_at_the_directory(
    end: Callable[[Estate], None], estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = estate.config.in_force
    assert last is not None
    estate.write(helper=agent(allow=["api.vendor.com", "new.vendor.com"]))
    end(estate)
    monkeypatch.setattr(config_pass, "snapshot_of", None)
    assert anyio.run(estate.config.keep_time)
    assert estate.allows() == []
    assert not estate.enabled()
    after = estate.config.in_force
    assert after is not None
    assert after.generation > last.generation
    assert [row["outcome"] for row in estate.rows("reason.lapsed")] == ["lapsed"]
    assert not anyio.run(estate.config.keep_time)


@ENDS
def test_what_ends_during_a_pass_has_ended_at_once_and_after_it(
    end: Callable[[Estate], None], estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass read the trust files, and what is in force, before."""
    entered, go_on = threading.Event(), threading.Event()

    def slow(host: Host) -> Snapshot | NotSettled:
        entered.set()
        assert go_on.wait(20)
        return snapshot_of(host)

    monkeypatch.setattr(config_pass, "snapshot_of", slow)
    estate.write(helper=agent(allow=["api.vendor.com"], description="new"))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(estate.config.run)
            await anyio.to_thread.run_sync(entered.wait)
            end(estate)
            assert await estate.config.keep_time()
            assert estate.allows() == []
            go_on.set()

    anyio.run(main)
    assert estate.allows() == []
    last = estate.config.last
    assert last is not None
    assert last.desired.documents["agents/helper"]["description"] == "new"
    assert [row["outcome"] for row in estate.rows("reason.lapsed")] == ["lapsed"]
    estate.restart()
    assert estate.allows() == []


def test_what_ends_while_a_long_list_of_rows_is_written_does_not_wait_for_its_end(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_pass, "_BATCH", 1)
    estate.write(**{f"a{number}": agent(f"a{number}", limits="{pids: 1}") for number in range(20)})
    append = estate.journal.append
    seen: list[tuple[Event, ...]] = []
    ended: list[int] = []

    async def main() -> None:
        async def slow(*events: Event) -> int:
            seen.append(events)
            if len(seen) == 3:
                estate.clock.turn(days=365)
                tasks.start_soon(estate.config.keep_time)
            await anyio.sleep(0.01)
            if not estate.allows():
                ended.append(len(seen))
            return await append(*events)

        monkeypatch.setattr(estate.journal, "append", slow)
        async with anyio.create_task_group() as tasks:
            await estate.config.run()

    anyio.run(main)
    assert estate.allows() == []
    assert ended[0] < len(seen) // 2
    last = estate.config.last
    assert last is not None
    assert "agents/a19" in last.desired.documents


def test_very_much_that_is_held_and_refused_is_counted_and_the_chain_holds(
    estate: Estate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_rows, "_MOST", 5)
    before = len(estate.rows("config.held")), len(estate.rows("reason.refused"))
    many = [f"host{number}.example.com" for number in range(9000)]
    estate.write(helper=agent(allow=["api.vendor.com", *many]))
    estate.write(**{f"a{number}": agent(f"a{number}", limits="{pids: 10000}") for number in range(20)})
    for number in range(20):
        (estate.root / "policy" / "reasons" / f"x{number}.sig").write_text("none")
    estate.run()
    estate.run()
    held, refused = estate.rows("config.held")[before[0] :], estate.rows("reason.refused")[before[1] :]
    assert len(held) == len(refused) == 6
    assert [row["object"] for row in (held[-1], refused[-1])] == ["*", "*"]
    assert refused[-1]["message"] == "15 more: `ringfence plan` names them"
    assert all(len(line_of(row)) < MOST_ROW for row in estate.rows())
