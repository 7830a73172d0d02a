"""What a signer approved stands only while the trust files bear it out, also at passes that read no statement."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import pytest

from reconciler import config_pass, snapshot
from reconciler.admission import Admission
from reconciler.core.grants import Action, Approval, Grant
from reconciler.core.trust import Trust
from reconciler.reason import read_trust
from reconciler.snapshot import NotSettled
from reconciler.standing import Standing
from tests.estate import PLATFORM, Estate, agent
from tests.signing import line, make_key, trust_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from reconciler.evaluate import Evaluated

ANYBODYS = {"document": "agents/helper", "field": "/allow", "add": "*.github.io"}
ONES = {"document": "agents/helper", "field": "/allow", "add": "one.vendor.com"}
ON = {"document": "platform", "field": "/enabled", "value": True}


@pytest.fixture
def estate(tmp_path: Path) -> Estate:
    """A host on which alice, bob and carol may sign."""
    made = Estate(tmp_path)
    made.keys["carol"] = make_key(tmp_path, "carol")
    made.trust("alice", "bob", "carol")
    made.write(platform=PLATFORM, helper=agent(allow=["one.vendor.com", "*.github.io"]))
    return made


@contextmanager
def missing(estate: Estate) -> Iterator[None]:
    policy = estate.root / "policy"
    policy.rename(estate.root / "away")
    yield
    (estate.root / "away").rename(policy)


@contextmanager
def others_can_write(estate: Estate) -> Iterator[None]:
    (estate.root / "policy").chmod(0o777)
    yield
    (estate.root / "policy").chmod(0o755)


@contextmanager
def never_quiet(estate: Estate) -> Iterator[None]:
    """Somebody writes a document each time before the directory is looked at, and between any two looks."""
    path = estate.root / "policy" / "agents" / "noise.yaml"
    look = snapshot._Reader._list
    count = itertools.count()

    def write_and_look(self: snapshot._Reader) -> object:
        path.write_text(agent("noise") + f"description: {'x' * next(count)}\n")
        return look(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot._Reader, "_list", write_and_look)
        yield
    path.unlink()


WAYS = [pytest.param(way, id=way.__name__.replace("_", " ")) for way in (missing, others_can_write, never_quiet)]
Way: TypeAlias = "Callable[[Estate], AbstractContextManager[None]]"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a directory without rest as long as it takes to see that it has none."""
    monkeypatch.setattr(config_pass, "SETTLE_S", 0.3)


def unsettled(estate: Estate) -> Evaluated:
    found = estate.run()
    assert isinstance(found.snapshot, NotSettled)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_signer_who_is_removed_has_nothing_in_force_while_no_directory_settles(way: Way, estate: Estate) -> None:
    estate.reason(1, ONES, by=["alice"])
    estate.reason(2, ON, by=["bob"])
    estate.run()
    assert (estate.allows(), estate.enabled()) == (["one.vendor.com"], True)
    with way(estate):
        estate.trust("bob", "carol")
        unsettled(estate)
        assert (estate.allows(), estate.enabled()) == ([], True)
        assert [(row["object"], row["actor"], row["code"]) for row in estate.rows("reason.lapsed")] == [
            ("CHG-1.1", "alice", "unknown_key")
        ]
        rows = len(estate.rows())
        unsettled(estate)
        assert len(estate.rows()) == rows, "it is told once"
        estate.trust("alice", "bob", "carol")
        unsettled(estate)
        assert estate.allows() == [], "nothing joins while no statement can be read"
    estate.run()
    assert estate.allows() == ["one.vendor.com"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["expired", "key_revoked", "id_revoked"])
def test_expiry_and_revocation_wait_for_no_settled_directory(what: str, way: Way, estate: Estate) -> None:
    estate.reason(1, ONES, by=["alice"], expires="2026-06-01T13:00:00Z")
    estate.run()
    assert estate.allows() == ["one.vendor.com"]
    with way(estate):
        unsettled(estate)
        assert estate.allows() == ["one.vendor.com"]
        if what == "expired":
            estate.clock.turn(hours=2)
        else:
            gone = {"key_revoked": f"key {estate.keys['alice'].fingerprint}", "id_revoked": "id CHG-1.1"}[what]
            estate.trust("alice", "bob", "carol", revoked=f"{gone}\n")
        unsettled(estate)
        assert estate.allows() == []
        assert [row["code"] for row in estate.rows("reason.lapsed")] == [what]


def narrowed(estate: Estate, how: str) -> None:
    """Take alice's signature away: by her key, or by her line."""
    if how == "revoked":
        estate.trust("alice", "bob", "carol", revoked=f"key {estate.keys['alice'].fingerprint}\n")
    else:
        estate.trust("bob", "carol")


HOW = pytest.mark.parametrize("how", ["revoked", "removed"])


@HOW
def test_where_enough_signers_remain_a_statement_does_not_lapse_for_one_pass_even(how: str, estate: Estate) -> None:
    estate.reason(1, ANYBODYS, by=["alice", "bob", "carol"])
    estate.run()
    before = estate.config.in_force
    narrowed(estate, how)
    found = estate.run()
    assert estate.allows() == ["*.github.io"]
    assert found.outcome.changes == ()
    assert estate.config.in_force == before
    assert [row["actor"] for row in estate.rows("reason.lapsed")] == ["alice"], "her signature alone"
    (admitted,) = found.admissions.admitted
    assert [one.signer for one in admitted.approvals] == ["bob", "carol"]


@HOW
@pytest.mark.parametrize("way", WAYS)
def test_nor_where_no_directory_settles(how: str, way: Way, estate: Estate) -> None:
    estate.reason(1, ANYBODYS, by=["alice", "bob", "carol"])
    estate.run()
    with way(estate):
        narrowed(estate, how)
        found = unsettled(estate)
        assert estate.allows() == ["*.github.io"]
        assert found.outcome.changes == ()
        assert {one.signer for grant in found.state.memory.grants for one in grant.approvals} == {"bob", "carol"}
        assert [row["actor"] for row in estate.rows("reason.lapsed")] == ["alice"]


@HOW
@pytest.mark.parametrize("settled", [True, False], ids=["settled", "missing"])
def test_one_of_two_is_not_enough_for_what_costs_two_and_is_for_the_rest(
    how: str, settled: bool, estate: Estate
) -> None:
    estate.reason(1, ANYBODYS, ONES, by=["alice", "bob"])
    estate.run()
    assert estate.allows() == ["one.vendor.com", "*.github.io"]
    narrowed(estate, how)
    if settled:
        estate.run()
        assert estate.allows() == ["one.vendor.com"]
    else:
        with missing(estate):
            unsettled(estate)
            assert estate.allows() == ["one.vendor.com"]


def test_two_keys_that_are_given_to_one_person_are_one_approval_also_while_nothing_settles(estate: Estate) -> None:
    estate.reason(1, ANYBODYS, by=["alice", "bob"])
    estate.run()
    with missing(estate):
        lines = [line("alice", estate.keys["alice"]), line("alice", estate.keys["bob"])]
        trust_directory(estate.root / "trust", *lines)
        unsettled(estate)
        assert estate.allows() == []


def test_a_signer_whose_time_is_over_stays_and_one_who_may_not_sign_any_more_does_not(estate: Estate) -> None:
    estate.reason(1, ONES, by=["alice"])
    estate.run()
    permission = 'namespaces="governance.weaken@ringfence.v1"'
    with missing(estate):
        over = f'{permission},valid-before="20260602Z"'
        trust_directory(estate.root / "trust", line("alice", estate.keys["alice"], over))
        estate.clock.turn(days=10)
        unsettled(estate)
        assert estate.allows() == ["one.vendor.com"], "a leaver keeps running hosts running"
        never = f'{permission},valid-before="20260501Z"'
        trust_directory(estate.root / "trust", line("alice", estate.keys["alice"], never))
        unsettled(estate)
        assert estate.allows() == [], "at the first admission she was no signer, says the file now"
        assert [row["code"] for row in estate.rows("reason.lapsed")] == ["signer_expired"]


def test_broken_trust_files_stop_nothing_but_what_they_revoke(estate: Estate) -> None:
    estate.reason(1, ONES, by=["alice"])
    estate.reason(2, ON, by=["bob"])
    estate.run()
    with missing(estate):
        trust_directory(estate.root / "trust", "nonsense\n")
        unsettled(estate)
        assert (estate.allows(), estate.enabled()) == (["one.vendor.com"], True)
        revoked = f"key {estate.keys['alice'].fingerprint}\n"
        trust_directory(estate.root / "trust", "nonsense\n", revoked=revoked)
        unsettled(estate)
        assert (estate.allows(), estate.enabled()) == ([], True)


def test_what_stands_is_the_very_same_and_what_nobody_admitted_is_gone(estate: Estate) -> None:
    trust = read_trust(estate.root / "trust")
    assert isinstance(trust, Trust)
    key = estate.keys["alice"].fingerprint
    admission = Admission(
        sha256="0" * 64, key=key, signer="alice", admitted_at=estate.clock.now(), id="CHG-1.1", ticket="CHG-1"
    )
    grants = tuple(
        Grant(
            id=identifier,
            document="agents/helper",
            field="/allow",
            action=Action.ADD,
            item="a.com",
            ticket="CHG-1",
            approvals=(Approval("alice", key),),
        )
        for identifier in ("CHG-1.1", "CHG-2.1")
    )
    standing = Standing.of([admission], trust)
    assert standing.left(grants)[0] is grants[0]
    assert len(standing.left(grants)) == 1
    only = (grants[0],)
    assert standing.left(only) is only
