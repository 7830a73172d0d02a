"""Owns what is remembered between passes, and its plain JSON for the state file; decides nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from reconciler.core.grants import Action, Approval, Grant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.core.load import Tree

VERSION = 1

_Reason: TypeAlias = "tuple[str, str, float | None, tuple[tuple[str, str], ...]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Everything that limits one agent: its own document, and by name each egress document that selects it."""

    own: Tree
    layers: Mapping[str, Tree] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """All that is remembered between passes. A new or wiped host has `Memory()`."""

    baseline_platform: Tree = None
    """What was ever tightened below the floor; None while no platform document was accepted."""
    baseline: Mapping[str, Unit] = field(default_factory=dict)
    """The same by agent, present or not: an agent that is absent leaves it alone. Under `*`, of the agents to come: the
    layers of the egress documents that ever selected every agent. They limit each agent."""
    last: Mapping[str, Tree] = field(default_factory=dict)
    """The last accepted content of each document that is there."""
    last_layers: Mapping[str, Mapping[str, Tree]] = field(default_factory=dict)
    """By agent, and under `*` for those to come, the last content of each egress document that ever selected it."""
    in_force: Tree = None
    """The tree of the last pass, as `core.policy.in_force` takes it; None before the first."""
    grants: tuple[Grant, ...] = ()
    """The live grants of the last accepted pass: what still counts while the directory is empty or missing."""
    held: str = ""
    """Digest of the held set."""

    def to_json(self) -> dict[str, Tree]:
        """Give plain JSON. Each content is written once, by digest: most agents share theirs with many others."""
        contents = _Contents()
        in_force = self.in_force
        if in_force is not None:
            agents = {
                name: {**agent, "own": contents.put(agent["own"]), "layers": contents.put_all(agent["layers"])}
                for name, agent in in_force["agents"].items()
            }
            to_come = {**in_force["to_come"], "layers": contents.put_all(in_force["to_come"]["layers"])}
            in_force = {**in_force, "agents": agents, "to_come": to_come}
        return {
            "version": VERSION,
            "baseline_platform": self.baseline_platform,
            "baseline": {
                name: {"own": contents.put(unit.own), "layers": contents.put_all(unit.layers)}
                for name, unit in self.baseline.items()
            },
            "last": contents.put_all(self.last),
            "last_layers": {name: contents.put_all(layers) for name, layers in self.last_layers.items()},
            "in_force": in_force,
            "reasons": [
                {
                    "id": key[0],
                    "ticket": key[1],
                    "expires": key[2],
                    "approvals": list(map(list, key[3])),
                    "grants": these,
                }
                for key, these in _by_reason(self.grants)
            ],
            "held": self.held,
            "contents": contents.by_digest,
        }

    @classmethod
    def from_json(cls, value: Tree) -> Memory:
        """Read what `to_json` wrote. ValueError when it is something else: a broken state is not an empty one."""
        try:
            if value["version"] != VERSION:
                raise ValueError(f"the state has version {value['version']}; this program reads {VERSION}")
            contents = value["contents"]
            in_force = value["in_force"]
            if in_force is not None:
                agents = {
                    name: {**agent, "own": contents[agent["own"]], "layers": _take_all(contents, agent["layers"])}
                    for name, agent in in_force["agents"].items()
                }
                in_force = {**in_force, "agents": agents}
                if "to_come" in in_force:  # an older version did not know of them
                    to_come = in_force["to_come"]
                    in_force["to_come"] = {**to_come, "layers": _take_all(contents, to_come["layers"])}
            return cls(
                baseline_platform=value["baseline_platform"],
                baseline={
                    name: Unit(own=contents[unit["own"]], layers=_take_all(contents, unit["layers"]))
                    for name, unit in value["baseline"].items()
                },
                last=_take_all(contents, value["last"]),
                last_layers={name: _take_all(contents, layers) for name, layers in value["last_layers"].items()},
                in_force=in_force,
                grants=tuple(grant for reason in value["reasons"] for grant in _of_reason(reason)),
                held=value["held"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state is not one that ringfence wrote: {error!r}") from error


class Pool:
    """Holds each content once: most agents share parts of theirs with many others. Serves one pass."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[object, Tree] = {}

    def put(self, tree: Tree) -> Tree:
        """Give the one object that stands for this content. What is put in must not be changed any more."""
        if isinstance(tree, dict):
            return self.top({key: self.put(value) for key, value in tree.items()})
        if isinstance(tree, list):
            return self._known.setdefault((list, *map(_name, tree)), tree)
        return tree

    def top(self, tree: dict[str, Tree]) -> dict[str, Tree]:
        """Give the one object for a map whose values are from here, or from wherever they are kept."""
        name = (dict, *((key, _name(value)) for key, value in tree.items()))
        found: dict[str, Tree] = self._known.setdefault(name, tree)
        return found


def _name(value: Tree) -> object:
    """Name a value in a pool: a container by its identity, which the pool keeps alive; True and 1 are two."""
    return (id(value),) if isinstance(value, dict | list) else (type(value), value)


class _Contents:
    """Contents by digest. What is one object in memory is looked at once."""

    __slots__ = ("_seen", "by_digest")

    def __init__(self) -> None:
        self.by_digest: dict[str, Tree] = {}
        self._seen: dict[int, tuple[str, Tree]] = {}

    def put(self, tree: Tree) -> str:
        found = self._seen.get(id(tree))
        if found is None:
            digest = digest_of(tree)[:32]
            self.by_digest[digest] = tree
            found = self._seen[id(tree)] = (digest, tree)
        return found[0]

    def put_all(self, trees: Mapping[str, Tree]) -> dict[str, str]:
        return {name: self.put(tree) for name, tree in trees.items()}


def _by_reason(grants: Iterable[Grant]) -> Iterable[tuple[_Reason, list[Tree]]]:
    """Give what grants of one signed reason have in common, with what each says; in the order of the grants."""
    for key, these in itertools.groupby(
        grants, lambda one: (one.id, one.ticket, one.expires, tuple((by.signer, by.key) for by in one.approvals))
    ):
        yield key, [[one.document, one.field, str(one.action), one.item] for one in these]


def _of_reason(reason: Tree) -> Iterable[Grant]:
    approvals = tuple(Approval(signer, key) for signer, key in reason["approvals"])
    for document, field_, action, item in reason["grants"]:
        yield Grant(
            id=reason["id"],
            document=document,
            field=sys.intern(field_),
            action=Action(action),
            item=item,
            ticket=reason["ticket"],
            approvals=approvals,
            expires=reason["expires"],
        )


def _take_all(contents: Mapping[str, Tree], digests: Mapping[str, str]) -> dict[str, Tree]:
    return {name: contents[digest] for name, digest in digests.items()}


def digest_of(tree: Tree) -> str:
    """Give the SHA-256 of a tree's canonical JSON, as hex."""
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()


def canonical_json(tree: Tree) -> str:
    """Write a tree in one way: sorted keys, no spaces, ASCII."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))
