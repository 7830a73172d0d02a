"""The promises of the formula over random histories of commits, reasons, expiries, bad files and restarts.

The oracle is not the walker: it asks the proxy's own functions target by target, and compares plain numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from proxy.entry import Entry, denies, matches, parse_deny
from reconciler.core.grants import Action, Approval, Grant
from reconciler.core.memory import Memory
from reconciler.core.reconcile import Outcome, reconcile
from reconciler.core.validate import Desired, desired
from tests.strategies import AGENTS, HOSTS, directories, entries, range_lists

TARGETS = [(host, port) for base in HOSTS for host in (base, f"z.{base}") for port in (22, 80, 443, 5432)]
ISOLATION = ("microvm", "gvisor", "container", "namespace")
BACKENDS = ("firecracker", "k8s", "docker", "auto", "bubblewrap")
FLOOR = {"cpus": 1, "memory": 512 * 2**20, "pids": 256, "timeout": 600, "output": 65536, "connections": 256}
BOTH = (Approval("alice", "SHA256:a"), Approval("bob", "SHA256:b"))


def grants() -> st.SearchStrategy[Grant]:
    """Draw grants of every field that a grant can be for, some of which expire."""
    own = st.sampled_from([f"agents/{name}" for name in AGENTS])
    layer = st.sampled_from(("egress/org", "egress/team"))
    value, add, remove = Action.VALUE, Action.ADD, Action.REMOVE
    shapes = st.one_of(
        st.tuples(own, st.just("/allow"), st.just(add), entries()),
        st.tuples(own, st.just("/deny"), st.just(remove), entries()),
        st.tuples(own, st.just("/submitters"), st.just(add), st.sampled_from(("svc", "ops"))),
        st.tuples(own, st.just("/env/allow"), st.just(add), st.sampled_from(("A", "B"))),
        st.tuples(own, st.just("/limits/pids"), st.just(value), st.sampled_from((16, 256, 512))),
        st.tuples(own, st.just("/minimum_isolation"), st.just(value), st.sampled_from(ISOLATION)),
        st.tuples(own, st.just("/secrets/TOKEN/file"), st.just(value), st.sampled_from(("/etc/s/one", "/etc/s/two"))),
        st.tuples(layer, st.just("/allow"), st.just(add), entries()),
        st.tuples(layer, st.just("/deny"), st.just(remove), entries()),
        st.tuples(
            layer, st.just("/deny_ranges"), st.just(remove), range_lists().map(lambda found: (found or ["::/0"])[0])
        ),
        st.tuples(layer, st.just("/default"), st.just(value), st.just("allow")),
        st.tuples(layer, st.just("/agents"), st.just(remove), st.sampled_from((*AGENTS, "*"))),
        st.tuples(st.just("platform"), st.just("/enabled"), st.just(value), st.just(True)),
        st.tuples(st.just("platform"), st.just("/backend"), st.just(value), st.sampled_from(BACKENDS)),
        st.tuples(st.just("platform"), st.just("/max_parallel_runs"), st.just(value), st.integers(1, 8)),
    )
    return st.builds(
        lambda shape, identifier, expires: Grant(
            id=identifier,
            document=shape[0],
            field=shape[1],
            action=shape[2],
            item=shape[3],
            ticket="T-1",
            approvals=BOTH,
            expires=expires,
        ),
        shapes,
        st.sampled_from(("CHG-1", "CHG-2", "CHG-3")),
        st.sampled_from((None, None, 10.0, 20.0)),
    )


@dataclass(frozen=True)
class Step:
    """One pass of a history."""

    files: dict[str, bytes]
    grants: list[Grant]
    passed: float
    broken: str | None


def steps() -> st.SearchStrategy[Step]:
    """Draw one pass: a commit (sometimes an empty one, sometimes with a broken file), reasons, time that passed."""
    broken = st.sampled_from((None, None, None, "platform.yaml", "agents/one.yaml", "egress/org.yaml"))
    nothing: dict[str, bytes] = {}
    files = st.one_of(directories(), directories(), directories(), st.just(nothing))
    return st.builds(Step, files, st.lists(grants(), max_size=6), st.sampled_from((0.0, 1.0, 9.0)), broken)


histories = st.lists(steps(), min_size=1, max_size=5)


@dataclass
class Seen:
    """One pass as it was taken."""

    wanted: Desired
    before: Any
    outcome: Outcome
    live: list[Grant]
    accepted: dict[str, Any]
    """What is wanted of each document, a bad or missing one as it was last accepted."""


def play(history: list[Step]) -> list[Seen]:
    """Take the passes one after another, with a restart between any two."""
    memory, now = Memory(), 1.0
    seen: list[Seen] = []
    last: dict[str, Any] = {}
    remembered: list[Grant] = []
    for step in history:
        now += step.passed
        files: dict[str, bytes] = dict(step.files)
        if step.broken is not None and files:
            files[step.broken] = b"version: 1\nkind: [\n"
        wanted = desired(files)
        before = memory.in_force or {"platform": None, "agents": {}}
        outcome = reconcile(wanted, memory, step.grants, now=now)
        again = reconcile(wanted, outcome.memory, step.grants, now=now)
        assert again.changes == ()
        assert again.tree == outcome.tree
        assert again.memory == outcome.memory
        assert not again.held_changed
        memory = Memory.from_json(json.loads(json.dumps(outcome.memory.to_json())))
        assert memory == outcome.memory
        if wanted.empty:
            live = [grant for grant in remembered if grant.expires is None or now < grant.expires]
        else:
            live = [grant for grant in step.grants if grant.expires is None or now < grant.expires]
            last = {**{name: last[name] for name in wanted.bad if name in last}, **wanted.documents}
        remembered = live
        seen.append(Seen(wanted, before, outcome, live, dict(last)))
    return seen


def reach(allow: list[str], deny: list[str]) -> set[tuple[str, int]]:
    """Give the targets that two lists let pass."""
    yes = [entry for text in allow if isinstance(entry := parse_deny(text), Entry)]
    no = [entry for text in deny if isinstance(entry := parse_deny(text), Entry)]
    return {
        (host, port)
        for host, port in TARGETS
        if any(matches(entry, host, port) for entry in yes) and not any(denies(entry, host, port) for entry in no)
    }


EVERYTHING = ["*.com:22", "*.com:80", "*.com:443", "*.com:5432"]


def passes(layer: Any) -> set[tuple[str, int]]:
    """Give the targets that one layer lets pass."""
    return reach(EVERYTHING if layer["default"] == "allow" else layer["allow"], layer["deny"])


@given(histories)
def test_nothing_in_force_is_looser_than_what_is_desired(history: list[Step]) -> None:
    for seen in play(history):
        platform = seen.accepted.get("platform", {})
        force = seen.outcome.tree["platform"]
        assert not force["enabled"] or platform["enabled"]
        assert force["max_parallel_runs"] <= platform.get("max_parallel_runs", 4)
        assert BACKENDS.index(force["backend"]) <= BACKENDS.index(platform.get("backend", "auto"))
        for name, agent in seen.outcome.tree["agents"].items():
            own, wanted = agent["own"], seen.accepted[f"agents/{name}"]
            assert reach(own["allow"], own["deny"]) <= reach(wanted["allow"], wanted["deny"])
            assert all(own["limits"][limit] <= wanted["limits"][limit] for limit in FLOOR)
            assert set(own["submitters"]) <= set(wanted["submitters"])
            assert set(own["env"]["allow"]) <= set(wanted["env"]["allow"])
            assert ISOLATION.index(own["minimum_isolation"]) <= ISOLATION.index(wanted["minimum_isolation"])
            for secret, value in own["secrets"].items():
                assert value["file"] in (None, wanted["secrets"][secret]["file"])
            for document, layer in seen.accepted.items():
                folder, _, short = document.partition("/")
                if folder == "egress" and {"*", name} & set(layer["agents"]):
                    assert passes(agent["layers"][short]) <= passes(layer)


@given(histories)
def test_everything_in_force_beyond_the_floor_is_licensed_by_a_live_grant(history: list[Step]) -> None:
    for seen in play(history):
        live: dict[tuple[str, str], list[Any]] = {}
        for grant in seen.live:
            live.setdefault((grant.document, grant.field), []).append(grant.item)
        platform = seen.outcome.tree["platform"]
        assert not platform["enabled"] or True in live.get(("platform", "/enabled"), [])
        assert platform["max_parallel_runs"] <= max([4, *live.get(("platform", "/max_parallel_runs"), [])])
        for name, agent in seen.outcome.tree["agents"].items():
            here = {field: items for (document, field), items in live.items() if document == f"agents/{name}"}
            own = agent["own"]
            assert reach(own["allow"], []) <= reach(here.get("/allow", []), [])
            assert set(own["submitters"]) <= set(here.get("/submitters", []))
            assert set(own["env"]["allow"]) <= set(here.get("/env/allow", []))
            assert own["limits"]["pids"] <= max([FLOOR["pids"], *here.get("/limits/pids", [])])
            assert own["limits"]["memory"] <= FLOOR["memory"]
            for secret, value in own["secrets"].items():
                blocked = f"/secrets/{secret}/file" in agent["blocked"]
                assert blocked if value["file"] is None else value["file"] in here[f"/secrets/{secret}/file"]
            for short, layer in agent["layers"].items():
                assert reach(layer["allow"], []) <= reach(live.get((f"egress/{short}", "/allow"), []), [])
                assert layer["default"] == "deny" or live.get((f"egress/{short}", "/default"))


@given(histories)
def test_what_was_ever_tightened_stays_tightened_unless_a_live_grant_lifts_it(history: list[Step]) -> None:
    pids: dict[str, int] = {}
    denied: dict[str, set[str]] = {}
    layers: dict[str, set[str]] = {}
    for seen in play(history):
        for document, wanted in seen.accepted.items():
            folder, _, name = document.partition("/")
            if folder == "agents":
                pids[name] = min(pids.get(name, FLOOR["pids"]), wanted["limits"]["pids"])
                denied.setdefault(name, set()).update(wanted["deny"])
                layers.setdefault(name, set()).update(
                    other.partition("/")[2]
                    for other, layer in seen.accepted.items()
                    if other.startswith("egress/") and {"*", name} & set(layer["agents"])
                )
        for name, agent in seen.outcome.tree["agents"].items():
            live = [grant for grant in seen.live if grant.document == f"agents/{name}"]
            raised = [grant.item for grant in live if grant.field == "/limits/pids"]
            assert agent["own"]["limits"]["pids"] <= max([pids[name], *raised])
            lifted = [
                entry for grant in live if grant.field == "/deny" and isinstance(entry := parse_deny(grant.item), Entry)
            ]
            stopped = [entry for text in agent["own"]["deny"] if isinstance(entry := parse_deny(text), Entry)]
            for text in denied[name]:
                for host, port in reach(EVERYTHING, []) - reach(EVERYTHING, [text]):
                    free = any(denies(entry, host, port) for entry in lifted)
                    assert free or any(denies(entry, host, port) for entry in stopped)
            gone = {
                grant.document.partition("/")[2]
                for grant in seen.live
                if grant.field == "/agents" and grant.item in ("*", name)
            }
            assert layers[name] - gone <= set(agent["layers"])


@given(histories)
def test_each_weakening_names_a_live_grant_and_only_weakenings_do(history: list[Step]) -> None:
    for seen in play(history):
        ids = {grant.id for grant in seen.live}
        for change in seen.outcome.changes:
            if change.weakening:
                assert change.grants
                assert set(change.grants) <= ids
                assert change.signers == ("alice", "bob")
                assert all(step.grants for step in change.steps)
            else:
                assert change.grants == ()


@given(histories)
def test_something_is_reported_as_held_exactly_when_something_was_held(history: list[Step]) -> None:
    for seen in play(history):
        tree, accepted = seen.outcome.tree, seen.accepted
        differs = False
        for name in ("enabled", "backend", "max_parallel_runs", "require_runtime_class", "k8s"):
            differs |= "platform" in accepted and tree["platform"][name] != accepted["platform"][name]
        for document, wanted in accepted.items():
            folder, _, name = document.partition("/")
            if folder != "agents":
                continue
            if name not in tree["agents"]:
                differs = True
                continue
            agent = tree["agents"][name]
            selected = {
                other.partition("/")[2]: {field: layer[field] for field in ("default", "allow", "deny", "deny_ranges")}
                for other, layer in accepted.items()
                if other.startswith("egress/") and {"*", name} & set(layer["agents"])
            }
            differs |= agent["own"] != wanted or agent["layers"] != selected
        assert bool(seen.outcome.held) is differs
        if seen.outcome.alarm is None:
            assert all(any(not step.grants for step in held.steps) for held in seen.outcome.held)


@given(histories)
def test_signing_the_missing_grants_leaves_nothing_held(history: list[Step]) -> None:
    last = play(history)[-1]
    if last.outcome.alarm is not None:
        return
    steps = {step.key: step for held in last.outcome.held for step in held.steps}
    missing = [
        Grant(
            id="NEW",
            document=one.document,
            field=one.field,
            action=one.action,
            item=item(one),
            ticket="T",
            approvals=BOTH,
        )
        for one in steps.values()
    ]
    outcome = reconcile(last.wanted, last.outcome.memory, [*last.live, *missing], now=0.0)
    assert outcome.held == ()
    assert all(change.weakening for change in outcome.changes)


def item(step: Any) -> Any:
    """Read a value as a statement writes it; the only ones with a unit here are limits."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "s": 1, "m": 60, "h": 3600}
    if step.field in ("/limits/memory", "/limits/timeout", "/limits/output"):
        number = "".join(sign for sign in step.value if sign.isdigit())
        return int(number) * units[step.value.removeprefix(number)]
    return step.value


@given(st.lists(directories(), min_size=1, max_size=4), st.lists(grants(), max_size=8))
def test_the_order_of_earlier_commits_does_not_matter(commits: list[dict[str, bytes]], live: list[Grant]) -> None:
    """Not even for the fields whose default is not their minimum, but for the contents of layers that went away."""

    def after(order: list[dict[str, bytes]]) -> Any:
        memory = Memory()
        for files in order:
            memory = reconcile(desired(files), memory, live, now=0.0).memory
        wanted = desired(order[-1]).documents
        tree = memory.in_force
        for name, agent in tree["agents"].items():
            selected = {
                other.partition("/")[2]
                for other, layer in wanted.items()
                if other.startswith("egress/") and {"*", name} & set(layer["agents"])
            }
            agent["layers"] = {layer: found for layer, found in agent["layers"].items() if layer in selected}
            del agent["reasons"]
        return tree

    *earlier, last = commits
    first = after([*earlier, last])
    assert after([*reversed(earlier), last]) == first
