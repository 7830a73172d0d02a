"""Owns the promises of the formula as checks of one pass, for tests over random histories; draws no history.

The oracle is not the walker: it asks the proxy's own functions target by target, and compares plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.entry import Entry, denies, matches, parse_deny
from reconciler.core.grants import Approval, Grant
from tests.strategies import HOSTS

if TYPE_CHECKING:
    from reconciler.core.reconcile import Outcome
    from reconciler.core.validate import Desired

TARGETS = [(host, port) for base in HOSTS for host in (base, f"z.{base}") for port in (22, 80, 443, 5432)]
ISOLATION = ("microvm", "gvisor", "container", "namespace")
BACKENDS = ("firecracker", "k8s", "docker", "auto", "bubblewrap")
FLOOR = {"cpus": 1, "memory": 512 * 2**20, "pids": 256, "timeout": 600, "output": 65536, "connections": 256}
BOTH = (Approval("alice", "SHA256:a"), Approval("bob", "SHA256:b"))


@dataclass
class Seen:
    """One pass as it was taken."""

    wanted: Desired
    before: Any
    outcome: Outcome
    live: list[Grant]
    accepted: dict[str, Any]
    """What is wanted of each document, a bad or missing one as it was last accepted."""


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


def nowhere_looser_than_desired(seen: Seen) -> None:
    """Nothing in force is looser than what is desired."""
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
    for document, layer in seen.accepted.items():
        if document.startswith("egress/") and "*" in layer["agents"]:
            to_come = seen.outcome.tree["to_come"]["layers"]
            assert passes(to_come[document.partition("/")[2]]) <= passes(layer)


def licensed_beyond_the_floor(seen: Seen) -> None:
    """Everything in force beyond the floor is covered by a live grant."""
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
        for limit, most in FLOOR.items():
            assert own["limits"][limit] <= max([most, *here.get(f"/limits/{limit}", [])])
        for secret, value in own["secrets"].items():
            blocked = f"/secrets/{secret}/file" in agent["blocked"]
            assert blocked if value["file"] is None else value["file"] in here[f"/secrets/{secret}/file"]
    for one in (*seen.outcome.tree["agents"].values(), seen.outcome.tree["to_come"]):
        for short, layer in one["layers"].items():
            assert reach(layer["allow"], []) <= reach(live.get((f"egress/{short}", "/allow"), []), [])
            assert layer["default"] == "deny" or live.get((f"egress/{short}", "/default"))


@dataclass
class Tightest:
    """What was ever tightened, on one host that was not wiped. Under `*` is what limits every agent to come."""

    pids: dict[str, int] = field(default_factory=dict)
    denied: dict[str, set[str]] = field(default_factory=dict)
    layers: dict[str, dict[str, set[str]]] = field(default_factory=lambda: {"*": {}})
    """By agent, the egress documents that ever selected it, each with every entry that it denied meanwhile."""
    latest: dict[tuple[str, str], Any] = field(default_factory=dict)
    """By agent and egress document, what the document said when it last selected the agent, there or not."""

    def stays(self, seen: Seen) -> None:
        """It stays unless a live grant lifts it."""
        self._select("*", seen)
        for document, wanted in seen.accepted.items():
            folder, _, name = document.partition("/")
            if folder == "agents":
                self.pids[name] = min(self.pids.get(name, FLOOR["pids"]), wanted["limits"]["pids"])
                self.denied.setdefault(name, set()).update(wanted["deny"])
                self._select(name, seen)
        self._layers_stay("*", seen.outcome.tree["to_come"], seen)
        for name, agent in seen.outcome.tree["agents"].items():
            live = [grant for grant in seen.live if grant.document == f"agents/{name}"]
            raised = [grant.item for grant in live if grant.field == "/limits/pids"]
            assert agent["own"]["limits"]["pids"] <= max([self.pids[name], *raised])
            lifted = [
                entry for grant in live if grant.field == "/deny" and isinstance(entry := parse_deny(grant.item), Entry)
            ]
            stopped = [entry for text in agent["own"]["deny"] if isinstance(entry := parse_deny(text), Entry)]
            for text in self.denied[name]:
                for host, port in reach(EVERYTHING, []) - reach(EVERYTHING, [text]):
                    free = any(denies(entry, host, port) for entry in lifted)
                    assert free or any(denies(entry, host, port) for entry in stopped)
            self._layers_stay(name, agent, seen)

    def _select(self, name: str, seen: Seen) -> None:
        for other, layer in seen.accepted.items():
            short = other.partition("/")[2]
            if other.startswith("egress/") and {"*", name} & set(layer["agents"]):
                self.layers.setdefault(name, {}).setdefault(short, set()).update(layer["deny"])
                for whom in [name, *(self.layers if name == "*" else ())]:
                    self.latest[whom, short] = layer

    def _layers_stay(self, name: str, agent: Any, seen: Seen) -> None:
        gone = {
            grant.document.partition("/")[2]
            for grant in seen.live
            if grant.field == "/agents" and grant.item in ("*", name)
        }
        for short in self.layers["*"].keys() | self.layers.get(name, {}).keys():
            if short not in agent["layers"]:
                assert short in gone
                continue
            lifted = [
                entry
                for grant in seen.live
                if (grant.document, grant.field) == (f"egress/{short}", "/deny")
                and isinstance(entry := parse_deny(grant.item), Entry)
            ]
            latest = self.latest.get((name, short)) or self.latest["*", short]
            assert passes(agent["layers"][short]) <= passes(latest)
            deny = agent["layers"][short]["deny"]
            stopped = [entry for text in deny if isinstance(entry := parse_deny(text), Entry)]
            for text in self.layers["*"].get(short, set()) | self.layers.get(name, {}).get(short, set()):
                for host, port in reach(EVERYTHING, []) - reach(EVERYTHING, [text]):
                    free = any(denies(entry, host, port) for entry in lifted)
                    assert free or any(denies(entry, host, port) for entry in stopped)


def a_new_agent_is_like_one_to_come(name: str, accepted: dict[str, Any], outcome: Outcome) -> None:
    """Whom no host ever met gets the layers of those to come, but for documents and grants that name it."""
    named = {
        document.partition("/")[2]
        for document, tree in accepted.items()
        if document.startswith("egress/") and name in tree["agents"]
    }
    named |= {grant.document.partition("/")[2] for grant in outcome.memory.grants if grant.item == name}
    layers, to_come = outcome.tree["agents"][name]["layers"], outcome.tree["to_come"]["layers"]
    assert {short: layers[short] for short in layers if short not in named} == {
        short: to_come[short] for short in to_come if short not in named
    }


def each_weakening_names_a_live_grant(seen: Seen) -> None:
    """And only weakenings do."""
    ids = {grant.id for grant in seen.live}
    for change in seen.outcome.changes:
        if change.weakening:
            assert change.grants
            assert set(change.grants) <= ids
            named = [grant for grant in seen.live if grant.id in change.grants]
            assert set(change.signers) <= {approval.signer for grant in named for approval in grant.approvals}
            assert change.signers
            assert all(step.grants for step in change.steps)
        else:
            assert change.grants == ()


def held_exactly_when_something_is(seen: Seen) -> None:
    """Something is reported as held exactly when something was held."""
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
    for_all = {
        other.partition("/")[2]: {field: layer[field] for field in ("default", "allow", "deny", "deny_ranges")}
        for other, layer in accepted.items()
        if other.startswith("egress/") and "*" in layer["agents"]
    }
    differs |= tree["to_come"]["layers"] != for_all
    assert bool(seen.outcome.held) is differs
    if seen.outcome.alarm is None:
        assert all(any(not step.grants for step in held.steps) for held in seen.outcome.held)
