"""Owns the formula, in force = desired ⊓ (baseline ⊔ live grants), per agent and for the platform; reads no files.

Which field is looser in which direction is not known here: the walker knows it from the schema.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconciler.core.findings import PLATFORM, SCOPE, Change, Held, Ledger, Teller, place_of
from reconciler.core.grants import NOTHING, Action, Grant, Licence, licences
from reconciler.core.memory import Memory, Pool, Unit, digest_of
from reconciler.core.order import Difference, Group, Keyed, Leaf, Order, Walk, floor, order_of
from reconciler.core.rules import Silent
from reconciler.core.schema import load_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.core.directions import Path
    from reconciler.core.findings import Place
    from reconciler.core.load import Tree
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
    """By agent, what was decided and of what: for the next pass, which takes over what did not change."""
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


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of what is compared: the platform, one layer, and one agent with its layers."""

    platform: Group
    own: Group
    layer: Group
    unit: Group


@functools.cache
def orders() -> Orders:
    """Compile them from the schemas, once. A layer is an egress document without its scope and its identity."""
    own, fields = order_of(load_schema("agent")), order_of(load_schema("egress")).fields
    layer = Group({name: order for name, order in fields.items() if name != SCOPE and not _silent(order)})
    scope = fields[SCOPE]
    approvals, why = (scope.approvals, scope.why) if isinstance(scope, Leaf) else (1, "")
    layers = Keyed(layer, floor(layer), removing=True, approvals=approvals, why=why, node={}, shared=True)
    return Orders(order_of(load_schema(PLATFORM)), own, layer, Group({"own": own, "layers": layers}))


def _silent(order: Order) -> bool:
    return isinstance(order, Leaf) and isinstance(order.rule, Silent)


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
        self._teller = Teller()
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
        self._held: Ledger[Held] = Ledger()
        self._changes: Ledger[Change] = Ledger()
        self._used: set[str] = set()

    def run(self) -> Outcome:
        """Decide for the platform, then for each agent."""
        memory = self._memory
        before = memory.in_force or {PLATFORM: floor(self._orders.platform), "agents": {}}
        baseline_platform, platform, reasons = self._platform(before[PLATFORM])
        baseline, last_layers = dict(memory.baseline), dict(memory.last_layers)
        agents: dict[str, Tree] = {}
        judged: dict[str, Judged] = {}
        names = sorted(name.partition("/")[2] for name in self._documents if name.startswith("agents/"))
        for name in names:
            found = judged[name] = self._agent(name, before["agents"].get(name), reasons)
            baseline[name], last_layers[name] = found.baseline, found.layers
            if found.in_force is not None:
                agents[name] = found.in_force
        for name in sorted(before["agents"].keys() - agents.keys()):
            self._came_or_went(name, before["agents"][name]["own"], None)
        tree = {PLATFORM: platform, "agents": agents}
        held = tuple(self._for_all(one, names) for one in self._held.all())
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
            changes=self._changes.all(),
            unused=tuple(sorted({grant.id for grant in self._live} - self._used)),
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
        for one in self._tell(order, licence, None, before=before, in_force=in_force, wanted=wanted):
            self._held.add(one)
        return walk.tighten(order, start, wanted), in_force, self._reasons(order, licence, None, start, in_force)

    def _agent(self, name: str, before: Tree, reasons: frozenset[str]) -> Judged:
        """Decide for one agent, or take over what was decided of the very same."""
        own = self._documents[f"agents/{name}"]
        chosen = tuple(layer for layer, (scope, _) in self._layers.items() if name in scope or "*" in scope)
        selected = self._selections.get(chosen)
        if selected is None:
            selected = self._selections[chosen] = {layer: self._layers[layer][1] for layer in chosen}
        start = self._start(name, selected)
        lifts = tuple((layer, grant) for layer, grant in self._lifts if grant.item in ("*", name))
        licence = self._licence(name, lifts)
        concerned = tuple(self._layer_licences.get(layer, NOTHING) for layer in sorted(start["layers"]))
        of = (own, selected, licence.at("own"), lifts, concerned, self._alarm, reasons)
        known = self._judged.get(name)
        if known is not None and known.of == of:
            # Applied again, the formula changes nothing: what is held is held against what is in force now.
            held = tuple(dataclasses.replace(one, before=one.after) for one in known.held)
            known = known if held == known.held else dataclasses.replace(known, held=held)
            for one in known.held:
                self._held.add(one)
            self._used |= known.used
            return known
        found = self._decide(name, before, wanted={"own": own, "layers": selected}, start=start, licence=licence)
        self._walk.forget()
        self._teller.forget()
        for one in found.held:
            self._held.add(one)
        in_force = found.in_force
        if in_force is not None:
            in_force = {**in_force, "reasons": sorted({*in_force["reasons"], *reasons})}
        return dataclasses.replace(found, of=of, in_force=in_force, reasons=reasons)

    def _decide(self, name: str, before: Tree, *, wanted: Tree, start: Tree, licence: Licence) -> Judged:
        """Decide the next baseline, the last content of each layer, and what is in force (None: nothing)."""
        order, walk = self._orders.unit, self._walk
        own, selected = wanted["own"], wanted["layers"]
        limit = walk.limit(order, start, licence, wanted)
        last = self._memory.last_layers.get(name, {})
        # A layer that went away and that no grant lifts stays as it was.
        kept = {layer: last.get(layer, tree) for layer, tree in limit["layers"].items() if layer not in selected}
        in_force = walk.meet(order, {"own": own, "layers": {**kept, **selected}}, limit)
        tightened = walk.tighten(order, start, wanted)
        baseline = Unit(own=self._pool.put(tightened["own"]), layers=self._pool.top(tightened["layers"]))
        layers = self._pool.top({**{layer: last[layer] for layer in baseline.layers if layer in last}, **selected})
        was = None if before is None else {"own": before["own"], "layers": before["layers"]}
        nothing: frozenset[str] = frozenset()
        if self._alarm is not None:
            if was is None:
                return Judged((), baseline, layers, None, (_whole(name, own),), nothing, nothing)
            in_force = walk.meet(order, in_force, was)
        new = was is None
        if was is None:
            self._came_or_went(name, None, in_force["own"])
            was = {"own": floor(self._orders.own), "layers": {}}
        held = self._tell(order, licence, name, before=was, in_force=in_force, wanted=wanted, new=new)
        used = self._reasons(order, licence, name, start, in_force)
        blocked = [_blocked(name, path) for path in walk.blocked(order, in_force)]
        in_force = {"own": in_force["own"], "layers": self._pool.top(in_force["layers"])}
        tree = {**in_force, "blocked": blocked, "reasons": sorted(used)}
        return Judged((), baseline, layers, tree, held, used, nothing)

    def _bottom(self, order: Group) -> Tree:
        """Give the baseline of what was never seen: the floor."""
        return self._walk.tighten(order, floor(order), floor(order))

    def _start(self, name: str, selected: Mapping[str, Tree]) -> Tree:
        """Give the baseline before this pass. A layer that is new to the agent starts at its floor."""
        known = self._memory.baseline.get(name) or Unit(own=self._own_floor)
        return {"own": known.own, "layers": {**dict.fromkeys(selected, self._layer_floor), **known.layers}}

    def _licence(self, name: str, lifts: tuple[tuple[str, Grant], ...]) -> Licence:
        """Give the grants that concern one agent, as a tree beside the agent's own document and its layers."""
        lifted = tuple(dataclasses.replace(grant, field="/layers", item=layer) for layer, grant in lifts)
        own = self._licences.get(f"agents/{name}", NOTHING)
        return Licence(below={"own": own, "layers": Licence(lifted, self._layer_licences)})

    def _tell(
        self,
        order: Order,
        licence: Licence,
        agent: str | None,
        *,
        before: Tree,
        in_force: Tree,
        wanted: Tree,
        new: bool = False,
    ) -> tuple[Held, ...]:
        """Note what changed (of what is `new` only what loosens: the rest changed nothing), and give what is held."""
        agents = () if agent is None else (agent,)
        held = []
        for one in self._walk.compare(order, in_force, wanted):
            steps = self._teller.steps(order, one, licence, agent)
            if not steps:
                continue
            place = place_of(one.path, agent)
            after, desired = _sides(place, one)
            held.append(
                Held(
                    document=place.document,
                    field=place.field,
                    before=after if place.of_scope else _value(before, one.path),
                    after=after,
                    wanted=desired,
                    agents=agents,
                    steps=steps,
                )
            )
        for one in self._walk.compare(order, before, in_force):
            steps = self._teller.steps(order, one, licence, agent)
            place = place_of(one.path, agent)
            if new and not steps and not place.of_scope:
                continue
            was, now = _sides(place, one)
            self._changes.add(
                Change(document=place.document, field=place.field, before=was, after=now, agents=agents, steps=steps)
            )
        return tuple(held)

    def _reasons(
        self, order: Order, licence: Licence, agent: str | None, start: Tree, in_force: Tree
    ) -> frozenset[str]:
        """Give the ids of the signed reasons without which less would be in force."""
        if not licence:
            return frozenset()
        found = frozenset(
            grant.id
            for one in self._walk.compare(order, start, in_force)
            for step in self._teller.steps(order, one, licence, agent)
            for grant in step.grants
        )
        self._used |= found
        return found

    def _came_or_went(self, name: str, before: Tree, after: Tree) -> None:
        self._changes.add(Change(document=f"agents/{name}", field="", before=before, after=after, agents=(name,)))

    def _for_all(self, held: Held, names: list[str]) -> Held:
        """Ask for one grant when an egress document is gone that limited every agent, instead of one for each."""
        gone = held.document.startswith("egress/") and held.document not in self._documents
        if not gone or len(names) == 1 or list(held.agents) != names:
            return held
        return dataclasses.replace(held, steps=(dataclasses.replace(held.steps[0], value="*"),))


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


def _whole(name: str, wanted: Tree) -> Held:
    return Held(document=f"agents/{name}", field="", before=None, after=None, wanted=wanted, agents=(name,), steps=())


def _sides(place: Place, one: Difference) -> tuple[Tree, Tree]:
    """Give the two sides of a difference; of a layer that came or went, whether it applies."""
    return (one.before is not None, one.after is not None) if place.of_scope else (one.before, one.after)


def _value(tree: Tree, path: Path) -> Tree:
    for token in path:
        if not isinstance(tree, dict) or token not in tree:
            return None
        tree = tree[token]
    return tree


def _blocked(agent: str, path: Path) -> str:
    place = place_of(path, agent)
    return place.field if place.document == f"agents/{agent}" else f"{place.document}#{place.field}"
