"""The promises of the formula over random histories of commits, reasons, expiries, bad files and restarts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reconciler.core.grants import Action, Grant
from reconciler.core.memory import Memory
from reconciler.core.reconcile import reconcile
from reconciler.core.validate import desired
from tests.core.promises import (
    BACKENDS,
    BOTH,
    ISOLATION,
    Seen,
    Tightest,
    each_weakening_names_a_live_grant,
    held_exactly_when_something_is,
    licensed_beyond_the_floor,
    nowhere_looser_than_desired,
)
from tests.strategies import AGENTS, directories, entries, range_lists


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
        assert again == reconcile(wanted, outcome.memory, step.grants, now=now, previous=outcome)
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


@given(histories)
def test_nothing_in_force_is_looser_than_what_is_desired(history: list[Step]) -> None:
    for seen in play(history):
        nowhere_looser_than_desired(seen)


@given(histories)
def test_everything_in_force_beyond_the_floor_is_licensed_by_a_live_grant(history: list[Step]) -> None:
    for seen in play(history):
        licensed_beyond_the_floor(seen)


@given(histories)
def test_what_was_ever_tightened_stays_tightened_unless_a_live_grant_lifts_it(history: list[Step]) -> None:
    tightest = Tightest()
    for seen in play(history):
        tightest.stays(seen)


@given(histories)
def test_each_weakening_names_a_live_grant_and_only_weakenings_do(history: list[Step]) -> None:
    for seen in play(history):
        each_weakening_names_a_live_grant(seen)


@given(histories)
def test_something_is_reported_as_held_exactly_when_something_was_held(history: list[Step]) -> None:
    for seen in play(history):
        held_exactly_when_something_is(seen)


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
    """Not even for the fields whose default is not their minimum, but for the contents of layers that went away.

    Nor does it matter whether an agent joined before or after an egress document that selected every agent went away.
    """

    def after(order: list[dict[str, bytes]]) -> Any:
        memory = Memory()
        for files in order:
            memory = reconcile(desired(files), memory, live, now=0.0).memory
        wanted = desired(order[-1]).documents
        tree = memory.in_force
        for name, agent in (*tree["agents"].items(), ("*", tree["to_come"])):
            selected = {
                other.partition("/")[2]
                for other, layer in wanted.items()
                if other.startswith("egress/") and {"*", name} & set(layer["agents"])
            }
            contents = agent["layers"].items()
            agent["layers"] = {layer: content if layer in selected else "kept" for layer, content in contents}
            del agent["reasons"]
        return tree

    *earlier, last = commits
    first = after([*earlier, last])
    assert after([*reversed(earlier), last]) == first
