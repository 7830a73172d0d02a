"""Owns the formula, in force = desired ⊓ (baseline ⊔ live grants), per agent and for the platform; reads no files.

Which field is looser in which direction is not known here: the walker knows it from the schema. The agents to come are
one more agent, of which only the layers are known: what its baseline limits, limits every agent, present or not.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconciler.core.findings import PLATFORM, SCOPE
from reconciler.core.grants import NOTHING, Action, Grant, Licence, licences
from reconciler.core.memory import Memory, Pool, Unit, digest_of
from reconciler.core.order import Walk, floor
from reconciler.core.telling import Telling, blocked, whole
from reconciler.core.units import TO_COME, orders

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.core.findings import Change, Held
    from reconciler.core.load import Tree
    from reconciler.core.order import Group
    from reconciler.core.validate import Desired


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one pass decided."""

    memory: Memory
    """For the next pass."""
    tree: Tree
    """What is in force now, plain JSON; give it to `core.policy.in_force`."""
    held: tuple[Held, ...]
    held_changed: bool
    """Whether the held set differs from the last pass's: only then is there a `config.held` row to write."""
    changes: tuple[Change, ...]
    unused: tuple[str, ...]
    """Ids of live signed reasons that nothing in force depends on."""
    alarm: str | None = None
    """Why nothing at all is loosened: no document is there, or a platform or egress document is bad."""
    judged: Mapping[str, Judged] = field(default_factory=dict, repr=False, compare=False)
    """By agent, and of those to come, what was decided and of what: the next pass takes over what did not change."""
    licences: Mapping[str, Licensed] = field(default_factory=dict, repr=False, compare=False)
    """By document, the index of its live grants: likewise."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a pass decided for one agent, and everything that it went by but for the memory."""

    of: tuple[object, ...]
    baseline: Unit
    layers: Mapping[str, Tree]
    in_force: Tree
    held: tuple[Held, ...]
    used: frozenset[str]
    reasons: frozenset[str]
    """Of the platform, which every agent depends on."""


@dataclass(frozen=True, slots=True)
class Licensed:
    """The live grants of one document, as they come and as a tree."""

    grants: tuple[Grant, ...]
    licence: Licence


def reconcile(
    desired: Desired,
    memory: Memory,
    grants: Iterable[Grant],
    *,
    now: float,
    lapsed: frozenset[str] = frozenset(),
    previous: Outcome | None = None,
) -> Outcome:
    """Decide what is in force after one pass.

    `grants` are those of the statements that are present, verified and not revoked; those that expired at `now` (Unix
    seconds that never run backwards) are dropped here too. `lapsed` are revoked statement ids: with an empty directory
    the remembered grants count, and they must not revive what was revoked. Pure; the same input twice changes nothing,
    which is why `previous`, the outcome of the pass before, can spare the work for each agent of which nothing changed:
    it counts only when `memory` is the very memory that it gave, and the outcome is the same as without it.
    """
    present = memory.grants if desired.empty else tuple(grants)
    live = tuple(
        grant for grant in present if (grant.expires is None or now < grant.expires) and grant.id not in lapsed
    )
    if previous is not None and previous.memory is not memory:
        previous = None
    return _Pass(desired, memory, live, previous).run()


class _Pass:
    """One pass: its arguments, what is worked out once for all agents, and what is found."""

    def __init__(
        self, desired: Desired, memory: Memory, live: tuple[Grant, ...], previous: Outcome | None = None
    ) -> None:
        self._memory = memory
        self._judged: Mapping[str, Judged] = {} if previous is None else previous.judged
        self._live = live
        self._orders = orders()
        self._walk = Walk()
        self._pool = Pool()
        self._selections: dict[tuple[str, ...], dict[str, Tree]] = {}
        self._telling = Telling(self._walk)
        self._documents = _documents(desired, memory)
        self._alarm = _alarm(desired)
        self._layers = {
            name.partition("/")[2]: (
                frozenset(tree[SCOPE]),
                {name: tree[name] for name in self._orders.layer.fields},
            )
            for name, tree in self._documents.items()
            if name.startswith("egress/")
        }
        known = {} if previous is None else previous.licences
        same = previous is not None and previous.memory.grants == live
        self._indexed = known if same else _indexed(live, known)
        self._licences = {name: found.licence for name, found in self._indexed.items()}
        self._layer_licences = {
            name.partition("/")[2]: licence for name, licence in self._licences.items() if name.startswith("egress/")
        }
        self._lifts = tuple(
            (layer, grant)
            for layer, licence in self._layer_licences.items()
            for grant in licence.at(SCOPE).here
            if grant.action is Action.REMOVE
        )
        self._own_floor = self._bottom(self._orders.own)
        self._layer_floor = self._bottom(self._orders.layer)
        self._for_every = memory.baseline.get(TO_COME, Unit(own={})).layers
        self._last_for_every = memory.last_layers.get(TO_COME, {})

    def run(self) -> Outcome:
        """Decide for the platform, then for the agents to come and for each agent."""
        memory, telling = self._memory, self._telling
        before = memory.in_force or {PLATFORM: floor(self._orders.platform), "agents": {}}
        baseline_platform, platform, reasons = self._platform(before[PLATFORM])
        baseline, last_layers = dict(memory.baseline), dict(memory.last_layers)
        to_come = self._agent(TO_COME, before.get("to_come"), frozenset())
        judged = {TO_COME: to_come}
        baseline[TO_COME], last_layers[TO_COME] = to_come.baseline, to_come.layers
        agents: dict[str, Tree] = {}
        for name in sorted(name.partition("/")[2] for name in self._documents if name.startswith("agents/")):
            found = judged[name] = self._agent(name, before["agents"].get(name), reasons)
            baseline[name], last_layers[name] = found.baseline, found.layers
            if found.in_force is not None:
                agents[name] = found.in_force
        for name in last_layers.keys() - judged.keys():
            last_layers[name] = self._last_of_absent(last_layers[name])
        for name in sorted(before["agents"].keys() - agents.keys()):
            telling.came_or_went(name, before["agents"][name]["own"], None)
        tree = {PLATFORM: platform, "agents": agents, "to_come": to_come.in_force}
        held = telling.held()
        waits = [[one.document, one.field, one.wanted, one.agents, [step.key for step in one.steps]] for one in held]
        digest = digest_of(waits) if held else ""
        return Outcome(
            memory=Memory(
                baseline_platform=baseline_platform,
                baseline=baseline,
                last=self._documents,
                last_layers=last_layers,
                in_force=tree,
                grants=self._live,
                held=digest,
            ),
            tree=tree,
            held=held,
            held_changed=digest != memory.held,
            changes=telling.changes(),
            unused=tuple(sorted({grant.id for grant in self._live} - telling.used)),
            alarm=self._alarm,
            judged=judged,
            licences=self._indexed,
        )

    def _platform(self, before: Tree) -> tuple[Tree, Tree, frozenset[str]]:
        """Give the next baseline, what is in force, and the ids of the reasons that it depends on."""
        order, walk = self._orders.platform, self._walk
        wanted = self._documents.get(PLATFORM, floor(order))
        start = self._memory.baseline_platform
        if start is None:
            start = self._bottom(order)
        licence = self._licences.get(PLATFORM, NOTHING)
        in_force = walk.meet(order, wanted, walk.limit(order, start, licence, wanted))
        if self._alarm is not None:
            in_force = walk.meet(order, in_force, before)
        telling = self._telling
        telling.holds(telling.tell(order, licence, None, before=before, in_force=in_force, wanted=wanted))
        return walk.tighten(order, start, wanted), in_force, telling.reasons(order, licence, None, start, in_force)

    def _agent(self, name: str, before: Tree, reasons: frozenset[str]) -> Judged:
        """Decide for one agent, or for those to come, or take over what was decided of the very same."""
        own = {} if name == TO_COME else self._documents[f"agents/{name}"]
        selected = self._selected(name)
        start = self._start(name, selected)
        lifts = tuple((layer, grant) for layer, grant in self._lifts if grant.item in (TO_COME, name))
        licence = self._licence(name, lifts)
        concerned = tuple(self._layer_licences.get(layer, NOTHING) for layer in sorted(start["layers"]))
        of = (own, selected, licence.at("own"), lifts, concerned, self._alarm, reasons)
        known = self._judged.get(name)
        if known is not None and known.of == of:
            # Applied again, the formula changes nothing: what is held is held against what is in force now.
            held = tuple(dataclasses.replace(one, before=one.after) for one in known.held)
            known = known if held == known.held else dataclasses.replace(known, held=held)
            self._telling.holds(known.held)
            self._telling.used |= known.used
            return known
        found = self._decide(name, before, wanted={"own": own, "layers": selected}, start=start, licence=licence)
        self._walk.forget()
        self._telling.forget()
        self._telling.holds(found.held)
        in_force = found.in_force
        if in_force is not None:
            in_force = {**in_force, "reasons": sorted({*in_force["reasons"], *reasons})}
        return dataclasses.replace(found, of=of, in_force=in_force, reasons=reasons)

    def _selected(self, name: str) -> Mapping[str, Tree]:
        """Give the content of each egress document that selects an agent; of those to come, that selects all."""
        chosen = tuple(layer for layer, (scope, _) in self._layers.items() if name in scope or TO_COME in scope)
        selected = self._selections.get(chosen)
        if selected is None:
            selected = self._selections[chosen] = {layer: self._layers[layer][1] for layer in chosen}
        return selected

    def _decide(self, name: str, before: Tree, *, wanted: Tree, start: Tree, licence: Licence) -> Judged:
        """Decide the next baseline, the last content of each layer, and what is in force (None: nothing)."""
        to_come = name == TO_COME
        order, walk = self._orders.to_come if to_come else self._orders.unit, self._walk
        own, selected = wanted["own"], wanted["layers"]
        limit = walk.limit(order, start, licence, wanted)
        last = {**self._last_for_every, **self._memory.last_layers.get(name, {})}
        # A layer that went away and that no grant lifts stays as it was.
        kept = {layer: last.get(layer, tree) for layer, tree in limit["layers"].items() if layer not in selected}
        in_force = walk.meet(order, {"own": own, "layers": {**kept, **selected}}, limit)
        tightened = walk.tighten(order, start, wanted)
        baseline = Unit(own=self._pool.put(tightened.get("own", {})), layers=self._pool.top(tightened["layers"]))
        layers = self._pool.top({**{layer: last[layer] for layer in baseline.layers if layer in last}, **selected})
        nothing: frozenset[str] = frozenset()
        new, was = before is None and not to_come, before
        if new and self._alarm is not None:
            return Judged((), baseline, layers, None, (whole(name, own),), nothing, nothing)
        if was is None:
            was = {"own": floor(self._orders.own), "layers": {}}
        if self._alarm is not None:
            in_force = walk.meet(order, in_force, was)
        if new:
            self._telling.came_or_went(name, None, in_force["own"])
        held = self._telling.tell(order, licence, name, before=was, in_force=in_force, wanted=wanted, new=new)
        used = self._telling.reasons(order, licence, name, start, in_force)
        tree = {**in_force, "layers": self._pool.top(in_force["layers"]), "reasons": sorted(used)}
        if not to_come:
            tree["blocked"] = [blocked(name, path) for path in walk.blocked(order, in_force)]
        return Judged((), baseline, layers, tree, held, used, nothing)

    def _bottom(self, order: Group) -> Tree:
        """Give the baseline of what was never seen: the floor."""
        return self._walk.tighten(order, floor(order), floor(order))

    def _start(self, name: str, selected: Mapping[str, Tree]) -> Tree:
        """Give the baseline before this pass. A layer that is new to the agent starts at its floor.

        What limits the agents to come limits each agent: one that joins, now or again, finds it there.
        """
        known = self._memory.baseline.get(name) or Unit(own=self._own_floor)
        layers = self._walk.tighten(self._orders.to_come.fields["layers"], known.layers, self._for_every)
        return {"own": known.own, "layers": {**dict.fromkeys(selected, self._layer_floor), **layers}}

    def _last_of_absent(self, last: Mapping[str, Tree]) -> Mapping[str, Tree]:
        """Leave out the layers that select every agent now: their last content is that of the agents to come."""
        newer = self._selected(TO_COME)
        return last if last.keys().isdisjoint(newer) else {name: last[name] for name in last if name not in newer}

    def _licence(self, name: str, lifts: tuple[tuple[str, Grant], ...]) -> Licence:
        """Give the grants that concern one agent, as a tree beside the agent's own document and its layers."""
        lifted = tuple(dataclasses.replace(grant, field="/layers", item=layer) for layer, grant in lifts)
        own = self._licences.get(f"agents/{name}", NOTHING)
        return Licence(below={"own": own, "layers": Licence(lifted, self._layer_licences)})


def _indexed(live: tuple[Grant, ...], known: Mapping[str, Licensed]) -> dict[str, Licensed]:
    """Index grants by document; what is known of the very same grants is taken over."""
    by_document: dict[str, list[Grant]] = {}
    for grant in live:
        by_document.setdefault(grant.document, []).append(grant)
    found = {}
    for document, these in by_document.items():
        grants, before = tuple(these), known.get(document)
        if before is None or before.grants != grants:
            before = Licensed(grants, licences(grants)[document])
        found[document] = before
    return found


def _documents(desired: Desired, memory: Memory) -> dict[str, Tree]:
    """Give what is wanted of each document: a bad one, or each where there is none at all, as it was last accepted."""
    if desired.empty:
        return dict(memory.last)
    last = {name: memory.last[name] for name in desired.bad if name in memory.last}
    return dict(sorted({**last, **desired.documents}.items()))


def _alarm(desired: Desired) -> str | None:
    if desired.empty:
        return "the policy directory holds no document: what is in force stays, and nothing is loosened"
    bad = sorted(name for name in desired.bad if not name.startswith("agents/"))
    return f"nothing is loosened while {', '.join(bad)} has problems" if bad else None
