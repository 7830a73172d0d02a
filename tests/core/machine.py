"""Owns a host that lives through anything: commits, reasons, expiries, revocations, clocks, wipes; checks each pass.

What it does to the formula's inputs is what git, signers, clocks and disks do; what it checks is `promises`.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from reconciler.core.grants import Action, Approval, Grant
from reconciler.core.memory import Memory
from reconciler.core.reconcile import Outcome, reconcile
from reconciler.core.validate import Desired, desired
from tests.core.promises import (
    BOTH,
    Seen,
    Tightest,
    a_new_agent_is_like_one_to_come,
    each_weakening_names_a_live_grant,
    held_exactly_when_something_is,
    licensed_beyond_the_floor,
    nowhere_looser_than_desired,
)
from tests.core.test_formula import grants, item
from tests.strategies import AGENTS, IMAGE, agents, directories, name_lists

IDS = ("CHG-1", "CHG-2", "CHG-3", "CHG-4")
ANYBODYS = "*.github.io"
"""An entry below which anybody can register: it costs two signers."""
SECRETS = ("/etc/s/one", "/etc/s/two")
BROKEN = b"version: 1\nkind: [\n"
JOINING = ("a.com", "x.com")


class Life(RuleBasedStateMachine):
    """One host, its policy directory, and the reasons that its signers put there. What happens to it, others say."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.kept: dict[str, bytes] = {}
        self.reasons: dict[str, list[Grant]] = {}
        self.revoked: set[str] = set()
        self.clock = self.seen_last = 100.0
        self.forget()

    def forget(self) -> None:
        """Lose the state."""
        self.memory = Memory()
        self.previous: Outcome | None = None
        self.tightest = Tightest()
        self.accepted: dict[str, Any] = {}
        self.remembered: list[Grant] = []
        self.seen_last = self.clock

    def take_a_pass(self) -> None:
        """Take a pass as the daemon does, once with and once without what the pass before worked out."""
        self.seen_last = now = max(self.clock, self.seen_last)
        wanted: Desired = desired(self.files, previous=None)
        present = [
            grant for identifier in sorted(self.reasons.keys() - self.revoked) for grant in self.reasons[identifier]
        ]
        lapsed = frozenset(self.revoked)
        before = self.memory.in_force or {"platform": None, "agents": {}}
        met = set(self.memory.baseline)
        whole = reconcile(wanted, self.memory, present, now=now, lapsed=lapsed)
        outcome = reconcile(wanted, self.memory, present, now=now, lapsed=lapsed, previous=self.previous)
        assert outcome == whole, "what is taken over is what would be worked out"
        again = reconcile(wanted, outcome.memory, present, now=now, lapsed=lapsed)
        spared = reconcile(wanted, outcome.memory, present, now=now, lapsed=lapsed, previous=outcome)
        assert again == spared
        assert (again.changes, again.tree, again.memory, again.held_changed) == (
            (),
            outcome.tree,
            outcome.memory,
            False,
        )
        self.memory, self.previous = outcome.memory, outcome
        counted = self.remembered if wanted.empty else present
        live = [one for one in counted if (one.expires is None or now < one.expires) and one.id not in self.revoked]
        self.remembered = live
        if not wanted.empty:
            bad = {name: self.accepted[name] for name in wanted.bad if name in self.accepted}
            self.accepted = {**bad, **wanted.documents}
        self._check(Seen(wanted, before, outcome, live, dict(self.accepted)), alarmed=outcome.alarm is not None)
        for name in outcome.tree["agents"].keys() - met:
            a_new_agent_is_like_one_to_come(name, self.accepted, outcome)

    def _check(self, seen: Seen, *, alarmed: bool) -> None:
        nowhere_looser_than_desired(seen)
        licensed_beyond_the_floor(seen)
        self.tightest.stays(seen)
        each_weakening_names_a_live_grant(seen)
        held_exactly_when_something_is(seen)
        if seen.wanted.empty:
            assert seen.outcome.tree["agents"].keys() == seen.before["agents"].keys(), (
                "an empty directory deletes nothing"
            )
        bad = {name for name in seen.wanted.bad if not name.startswith("agents/")}
        assert alarmed == (seen.wanted.empty or bool(bad))
        if alarmed:
            assert not any(change.weakening for change in seen.outcome.changes), "an alarm holds all loosening"
        for name in seen.wanted.bad & {f"agents/{one}" for one in seen.before["agents"]}:
            assert name.partition("/")[2] in seen.outcome.tree["agents"], "a bad document is not one that is gone"
        for name, agent in seen.outcome.tree["agents"].items():
            if ANYBODYS in agent["own"]["allow"]:
                assert any(
                    grant.document == f"agents/{name}" and grant.item == ANYBODYS and len(grant.approvals) > 1
                    for grant in seen.live
                ), "what anybody can register below costs two"


class Host(Life):
    """Lives through everything that git, signers, clocks and disks do."""

    @initialize(files=directories())
    def begin(self, files: dict[str, bytes]) -> None:
        """Start with a commit."""
        self.commit(files)

    @rule(files=directories())
    def commit(self, files: dict[str, bytes]) -> None:
        """Check another commit out."""
        self.files = dict(files)
        self.take_a_pass()

    @rule(name=st.sampled_from(AGENTS), by=st.sampled_from(((), BOTH[:1], BOTH)))
    def ask_for_what_anybody_can_register(self, name: str, by: tuple[Approval, ...]) -> None:
        """Commit an entry that costs two signers, and have nobody, one or both sign for it."""
        if by:
            self.reasons["CHG-2"] = [_signed(_grant(f"agents/{name}", ANYBODYS), "CHG-2", by, None)]
        file = f"agents/{name}.yaml"
        if self.files.get(file, BROKEN) != BROKEN:
            document = json.loads(self.files[file])
            document["allow"] = [*document.get("allow", []), ANYBODYS]
            self.files[file] = json.dumps(document).encode()
        self.take_a_pass()

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """Delete one document."""
        others = sorted(name for name in self.files if name != "platform.yaml")
        if others:
            del self.files[data.draw(st.sampled_from(others))]
        self.take_a_pass()

    @rule(folder=st.sampled_from(("agents", "egress")), data=st.data())
    def rename(self, folder: str, data: st.DataObject) -> None:
        """Give one document another name."""
        names = sorted(file for file, text in self.files.items() if file.startswith(folder) and text != BROKEN)
        if names:
            document = json.loads(self.files.pop(data.draw(st.sampled_from(names))))
            document["name"] = data.draw(st.sampled_from(AGENTS if folder == "agents" else ("org", "team")))
            self.files[f"{folder}/{document['name']}.yaml"] = json.dumps(document).encode()
        self.take_a_pass()

    @rule(name=st.sampled_from(("org", "team")), scope=name_lists(), data=st.data())
    def change_whom_it_limits(self, name: str, scope: list[str], data: st.DataObject) -> None:
        """Let an egress document select other agents; mostly widen it to all, or narrow it."""
        file = f"egress/{name}.yaml"
        if self.files.get(file, BROKEN) != BROKEN:
            document = json.loads(self.files[file])
            document["agents"] = ["*"] if data.draw(st.booleans()) else scope
            self.files[file] = json.dumps(document).encode()
        self.take_a_pass()

    @precondition(lambda self: bool(self.files))
    @rule(name=st.sampled_from(AGENTS), data=st.data())
    def let_an_agent_join(self, name: str, data: st.DataObject) -> None:
        """Commit an agent that no document named, or one that was there before."""
        self.files.setdefault(f"agents/{name}.yaml", json.dumps(data.draw(agents(name))).encode())
        self.take_a_pass()

    @rule(file=st.sampled_from(("platform.yaml", "agents/one.yaml", "agents/two.yaml", "egress/org.yaml")))
    def break_a_file(self, file: str) -> None:
        """Save half a file."""
        if self.files:
            self.files[file] = BROKEN
        self.take_a_pass()

    @precondition(lambda self: bool(self.files))
    @rule()
    def lose_the_directory(self) -> None:
        """Unmount it, or empty it."""
        self.kept, self.files = self.files, {}
        self.take_a_pass()

    @precondition(lambda self: not self.files)
    @rule()
    def find_the_directory(self) -> None:
        """Mount it again."""
        self.files = self.kept
        self.take_a_pass()

    @rule(identifier=st.sampled_from(IDS), found=st.lists(grants(), min_size=1, max_size=4), data=st.data())
    def sign(self, identifier: str, found: list[Grant], data: st.DataObject) -> None:
        """Put a statement there, in place of another with its id."""
        lasts = data.draw(st.sampled_from((None, 5.0, 20.0)))
        by = data.draw(st.sampled_from((BOTH[:1], BOTH)))
        expires = None if lasts is None else self.seen_last + lasts
        self.reasons[identifier] = [_signed(grant, identifier, by, expires) for grant in found]
        self.take_a_pass()

    @precondition(lambda self: self.previous is not None and bool(self.previous.held))
    @rule(identifier=st.sampled_from(IDS), lasts=st.sampled_from((None, 5.0, 20.0)), data=st.data())
    def sign_what_is_missing(self, identifier: str, lasts: float | None, data: st.DataObject) -> None:
        """Sign for some of what is held, as `plan --emit-reason` writes it."""
        held = () if self.previous is None else self.previous.held
        steps = {step.key: step for one in held for step in one.steps}
        chosen = sorted(steps)
        if chosen and data.draw(st.integers(0, 3)) == 0:
            chosen = data.draw(st.lists(st.sampled_from(chosen), min_size=1, max_size=6))
        expires = None if lasts is None else self.seen_last + lasts
        self.reasons[identifier] = [
            Grant(
                id=identifier,
                document=step.document,
                field=step.field,
                action=step.action,
                item=item(step),
                ticket="T-1",
                approvals=BOTH,
                expires=expires,
            )
            for step in (steps[key] for key in chosen)
        ]
        self.take_a_pass()

    @rule(name=st.sampled_from(AGENTS), wanted=st.sampled_from(SECRETS), granted=st.sampled_from(SECRETS))
    def sign_for_a_secret(self, name: str, wanted: str, granted: str) -> None:
        """Commit a secret, and sign for that file or another."""
        file = f"agents/{name}.yaml"
        if self.files.get(file, BROKEN) != BROKEN:
            document = json.loads(self.files[file])
            document["secrets"] = {"TOKEN": {"file": wanted}}
            self.files[file] = json.dumps(document).encode()
        self.reasons["CHG-1"] = [
            Grant(
                id="CHG-1",
                document=f"agents/{name}",
                field="/secrets/TOKEN/file",
                action=Action.VALUE,
                item=granted,
                ticket="T-1",
                approvals=BOTH,
            )
        ]
        self.take_a_pass()

    @rule(identifier=st.sampled_from(IDS))
    def delete_a_reason(self, identifier: str) -> None:
        """Take a statement away; putting it back is another rule's."""
        self.reasons.pop(identifier, None)
        self.take_a_pass()

    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        """Revoke a statement by its id, or take that back; mostly one that counts."""
        counts = sorted({grant.id for grant in self.remembered})
        self.revoked ^= {data.draw(st.sampled_from(counts or IDS))}
        self.take_a_pass()

    @rule(by=st.sampled_from((1.0, 6.0, 6.0, 30.0, 30.0, -1.0, -50.0)))
    def turn_the_clock(self, by: float) -> None:
        """Let time pass, or set the clock back."""
        self.clock += by
        self.take_a_pass()

    @rule()
    def restart(self) -> None:
        """Stop the daemon and start it: what was not on disk is gone."""
        self.memory = Memory.from_json(json.loads(json.dumps(self.memory.to_json())))
        self.previous = None
        self.take_a_pass()

    @rule()
    def wipe(self) -> None:
        """Lose the state."""
        self.forget()
        if self.files:
            self.take_a_pass()


class Joining(Life):
    """Lives through agents that come and go below two egress documents whose scope and content change."""

    @initialize()
    def begin(self) -> None:
        """Start with nothing but a platform, and grants for everything that the documents ever allow."""
        self.files = {"platform.yaml": json.dumps({"version": 1, "kind": "platform"}).encode()}
        self.reasons["CHG-1"] = [
            _signed(_grant(f"egress/{name}", entry), "CHG-1", BOTH, None)
            for name in ("org", "team")
            for entry in JOINING
        ]
        self.take_a_pass()

    @rule(
        name=st.sampled_from(("org", "org", "org", "team")),
        scope=st.sampled_from((["*"], ["one"], None)),
        allow=st.lists(st.sampled_from(JOINING), max_size=2),
        deny=st.lists(st.sampled_from(JOINING), max_size=1),
    )
    def write(self, name: str, scope: list[str] | None, allow: list[str], deny: list[str]) -> None:
        """Commit an egress document, or its end."""
        document = {"version": 1, "kind": "egress", "name": name, "agents": scope, "allow": allow, "deny": deny}
        self.files[f"egress/{name}.yaml"] = json.dumps(document).encode()
        if scope is None:
            del self.files[f"egress/{name}.yaml"]
        self.take_a_pass()

    @rule(name=st.sampled_from(AGENTS[:2]))
    def come_or_go(self, name: str) -> None:
        """Let an agent join, or leave."""
        document = {"version": 1, "kind": "agent", "name": name, "image": IMAGE}
        if self.files.pop(f"agents/{name}.yaml", None) is None:
            self.files[f"agents/{name}.yaml"] = json.dumps(document).encode()
        self.take_a_pass()

    @rule(name=st.sampled_from(("one", "*")), lasts=st.sampled_from((5.0, 15.0)))
    def lift(self, name: str, lasts: float) -> None:
        """Sign that the document does not limit one agent, or all."""
        grant = Grant(
            id="CHG-2",
            document="egress/org",
            field="/agents",
            action=Action.REMOVE,
            item=name,
            ticket="T-1",
            approvals=BOTH,
            expires=self.seen_last + lasts,
        )
        self.reasons["CHG-2"] = [grant]
        self.take_a_pass()

    @rule()
    def start_again_later(self) -> None:
        """Stop the daemon, let what expires expire, and start it."""
        self.memory = Memory.from_json(json.loads(json.dumps(self.memory.to_json())))
        self.previous = None
        self.clock += 6.0
        self.take_a_pass()


def _grant(document: str, entry: str) -> Grant:
    return Grant(id="", document=document, field="/allow", action=Action.ADD, item=entry, ticket="T-1", approvals=())


def _signed(grant: Grant, identifier: str, by: tuple[Approval, ...], expires: float | None) -> Grant:
    return Grant(
        id=identifier,
        document=grant.document,
        field=grant.field,
        action=grant.action,
        item=grant.item,
        ticket=grant.ticket,
        approvals=by,
        expires=expires,
    )
