"""Owns what is remembered between passes, and its plain JSON for the state file; decides nothing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconciler.core.grants import Grant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.core.load import Tree

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Everything that limits one agent: its own document, and by name each egress document that selects it."""

    own: Tree
    layers: Mapping[str, Tree] = field(default_factory=dict)

    def tree(self) -> dict[str, Tree]:
        """Give it as the walker takes it."""
        return {"own": self.own, "layers": dict(self.layers)}

    @classmethod
    def of(cls, tree: Tree) -> Unit:
        """Read what `tree` gave."""
        return cls(own=tree["own"], layers=tree["layers"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """All that is remembered between passes. A new or wiped host has `Memory()`."""

    baseline_platform: Tree = None
    """What was ever tightened below the floor; None while no platform document was accepted."""
    baseline: Mapping[str, Unit] = field(default_factory=dict)
    """The same by agent, present or not: an agent that is absent leaves it alone."""
    last: Mapping[str, Tree] = field(default_factory=dict)
    """The last accepted content of each document that is there."""
    last_layers: Mapping[str, Mapping[str, Tree]] = field(default_factory=dict)
    """By agent, the last content of each egress document that ever selected it."""
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
            in_force = {**in_force, "agents": agents}
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
            "grants": [grant.to_json() for grant in self.grants],
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
            return cls(
                baseline_platform=value["baseline_platform"],
                baseline={
                    name: Unit(own=contents[unit["own"]], layers=_take_all(contents, unit["layers"]))
                    for name, unit in value["baseline"].items()
                },
                last=_take_all(contents, value["last"]),
                last_layers={name: _take_all(contents, layers) for name, layers in value["last_layers"].items()},
                in_force=in_force,
                grants=tuple(Grant.from_json(grant) for grant in value["grants"]),
                held=value["held"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state is not one that ringfence wrote: {error!r}") from error


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


def _take_all(contents: Mapping[str, Tree], digests: Mapping[str, str]) -> dict[str, Tree]:
    return {name: contents[digest] for name, digest in digests.items()}


def digest_of(tree: Tree) -> str:
    """Give the SHA-256 of a tree's canonical JSON, as hex."""
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()


def canonical_json(tree: Tree) -> str:
    """Write a tree in one way: sorted keys, no spaces, ASCII."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))
