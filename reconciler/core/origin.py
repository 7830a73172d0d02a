"""Owns where each entry in force comes from: the document and line that write it, and the reason that licenses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconciler.core.findings import SCOPE
from reconciler.core.load import Document, load
from reconciler.core.order import Leaf, find, order_of
from reconciler.core.resolve import canonical
from reconciler.core.rules import Covered
from reconciler.core.schema import load_schema
from reconciler.core.units import TO_COME
from reconciler.core.validate import document_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from reconciler.core.grants import Grant
    from reconciler.core.load import Position, Tree
    from reconciler.core.policy import Effective, Layer

KEPT = "kept from an earlier revision: no live grant lifts it"


@dataclass(frozen=True, slots=True)
class Origin:
    """One entry in force. `where` is FILE:LINE of what writes it, or why nothing does; `reasons` are ids."""

    document: str
    field: str
    entry: str
    where: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        by = f"; licensed by {', '.join(self.reasons)}" if self.reasons else ""
        return f"{self.document} /{self.field} {self.entry}: {self.where}{by}"


def kept(agent: str, layers: Iterable[Layer], documents: Mapping[str, Tree]) -> tuple[str, ...]:
    """Give the layers over an agent (`*`: those to come) whose document, of those last accepted, does not select it."""
    scopes = {layer.name: (documents.get(f"egress/{layer.name}") or {SCOPE: []})[SCOPE] for layer in layers}
    return tuple(name for name, scope in scopes.items() if agent not in scope and TO_COME not in scope)


def origins(effective: Effective, files: Mapping[str, bytes], grants: Iterable[Grant]) -> tuple[Origin, ...]:
    """Tell of each entry of an agent's lists and of its layers', and of what puts it under each layer.

    `files` are those of the snapshot that is in force.
    """
    agent = effective.agent
    lists: list[tuple[str, str, list[str]]] = [
        (f"agents/{agent.name}", "allow", [str(entry) for entry in agent.allow]),
        (f"agents/{agent.name}", "deny", [str(entry) for entry in agent.deny]),
    ]
    for layer in effective.layers:
        name = f"egress/{layer.name}"
        lists += [
            (name, SCOPE, [agent.name]),
            (name, "allow", [str(entry) for entry in layer.allow]),
            (name, "deny", [str(entry) for entry in layer.deny]),
            (name, "deny_ranges", list(layer.deny_ranges)),
        ]
    named = {document_of(file): file for file in files}
    read: dict[str, Document | None] = {}
    by_field: dict[tuple[str, str], list[Grant]] = {}
    for grant in grants:
        by_field.setdefault((grant.document, grant.field), []).append(grant)
    found = []
    for document, field, entries in lists:
        file = named.get(document)
        if document not in read:
            loaded = load(file, files[file]) if file is not None else None
            read[document] = loaded if isinstance(loaded, Document) else None
        written = list(_written(document, field, read[document], agent.name))
        rule = _rule(document, field)
        for entry in entries:
            lines = [position for text, position in written if rule.function.within([entry], [text])]
            where = f"{file}:{lines[0][0]}" if lines else KEPT
            licensed = () if rule.removing else _licensing(rule, entry, by_field.get((document, f"/{field}"), []))
            found.append(Origin(document, field, entry, where, licensed))
    return tuple(found)


def _licensing(rule: Covered, entry: str, grants: Iterable[Grant]) -> tuple[str, ...]:
    return tuple(sorted({grant.id for grant in grants if rule.function.within([entry], [grant.item])}))


def _rule(document: str, field: str) -> Covered:
    kind = "agent" if document.startswith("agents/") else "egress"
    leaf = find(order_of(load_schema(kind)), (field,))
    if not isinstance(leaf, Leaf) or not isinstance(leaf.rule, Covered):
        raise TypeError(f"{document} /{field} is no list of entries")
    return leaf.rule


def _written(document: str, field: str, loaded: Document | None, agent: str) -> Iterator[tuple[str, Position]]:
    """Give what a document writes for an agent in one list, in canonical form, with its place."""
    if loaded is None:
        return
    scope: Tree = loaded.value.get(SCOPE)
    if document.startswith("egress/") and not (isinstance(scope, list) and (agent in scope or TO_COME in scope)):
        return
    kind = "agent" if document.startswith("agents/") else "egress"
    node = load_schema(kind).root["properties"][field]["items"]
    items: Tree = loaded.value.get(field) or []
    for index, item in enumerate(items if isinstance(items, list) else []):
        text = canonical(node, item)
        if isinstance(text, str):
            yield text, loaded.at(f"/{field}/{index}")
