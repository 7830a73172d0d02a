"""Owns what a signed statement says and whether it counts here and now; does not verify who signed it."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from reconciler.core import formats
from reconciler.core.directions import NEVER_APPROVED
from reconciler.core.grants import Action, Approval, Grant
from reconciler.core.load import Bounds, load, split
from reconciler.core.order import Keyed, Leaf, find, order_of
from reconciler.core.resolve import canonical, out_of_bounds, resolve
from reconciler.core.rules import Covered
from reconciler.core.schema import load_schema

if TYPE_CHECKING:
    from reconciler.core.load import Document, Problem, Tree
    from reconciler.core.schema import Node

MAX_BYTES = 64 * 1024
_BOUNDS = Bounds(bytes=MAX_BYTES, nodes=100_000)
_LEAST_REASON = 10
UNFILLED = "FILL IN"
"""The reason in a statement that was made and not filled in."""
_KINDS = {"agents": "agent", "egress": "egress"}
OTHER_HOST = "other_host"
"""The code of a statement for other hosts: nothing is wrong with it, and nobody has to be told."""
NOT_LOOKED_AT = "not_looked_at"
"""The code of a signature for which a pass had no time left."""


@dataclass(frozen=True, slots=True)
class ReasonRefused:
    """A signed reason that does not count; the message says what mends it and quotes nothing of an unsigned file."""

    code: str
    message: str

    @property
    def transient(self) -> bool:
        """Whether this says nothing of the signature, only that it could not be verified now."""
        return self.code in {"timeout", "verifier_missing", "verifier_failed", NOT_LOOKED_AT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What this host asks of a statement. `max_age` in seconds; None sets no cap."""

    host: str
    ticket_pattern: str
    max_age: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement, read. `expires` is Unix seconds, None for `never`. `grants` carry no approvals yet."""

    id: str
    sha256: str
    audience: tuple[str, ...]
    expires: float | None
    ticket: str
    reason: str
    grants: tuple[Grant, ...]

    def addresses(self, host: str) -> bool:
        """Say whether its audience has the host of this name."""
        return any(fnmatch.fnmatchcase(host, glob) for glob in self.audience)

    def approved(self, approvals: tuple[Approval, ...]) -> tuple[Grant, ...]:
        """Give the grants with who signed them."""
        return tuple(
            Grant(
                id=grant.id,
                document=grant.document,
                field=grant.field,
                action=grant.action,
                item=grant.item,
                ticket=grant.ticket,
                approvals=approvals,
                expires=grant.expires,
            )
            for grant in self.grants
        )


def read(file: str, data: bytes) -> Statement | tuple[Problem, ...]:
    """Read a statement's bytes, which somebody signed; every problem of its form, sorted. `file` names it in them."""
    document = load(file, data, bounds=_BOUNDS)
    if isinstance(document, tuple):
        return tuple(_unfilled(one, None) for one in document)
    resolved = resolve(document, load_schema("signed-reason"))
    if isinstance(resolved, tuple):
        return tuple(_unfilled(one, document) for one in resolved)
    value = resolved.value
    problems: list[Problem] = []
    grants: list[Grant] = []
    expires = None if value["expires"] == "never" else float(value["expires"])
    for index, written in enumerate(value["grants"]):
        found = _grant(written)
        if isinstance(found, _Wrong):
            problems.append(document.problem(f"/grants/{index}{found.where}", found.message))
            continue
        action, item = found
        grants.append(
            Grant(
                id=value["id"],
                document=written["document"],
                field=sys.intern(written["field"]),
                action=action,
                item=item,
                ticket=value["ticket"],
                approvals=(),
                expires=expires,
            )
        )
    problems += _words(document, ticket=value["ticket"], reason=value["reason"])
    if problems:
        return tuple(sorted(problems))
    return Statement(
        id=value["id"],
        sha256=hashlib.sha256(data).hexdigest(),
        audience=tuple(value["audience"]),
        expires=expires,
        ticket=value["ticket"],
        reason=value["reason"],
        grants=tuple(grants),
    )


def _unfilled(problem: Problem, document: Document | None) -> Problem:
    """Say of what `ringfence reason new` left open that it is still so. `document` is None where it is no YAML yet."""
    if problem.where == "/reason" and document is not None and document.value.get("reason") == UNFILLED:
        message = f"is still {UNFILLED}; say in at least ten characters why"
    elif problem.where == "/grants" and (document is None or not document.value.get("grants")):
        message = "is empty; list at least one grant"
    else:
        return problem
    return dataclasses.replace(problem, message=message)


def _words(document: Document, *, ticket: str, reason: str) -> list[Problem]:
    said = re.sub(r"\s+", " ", reason.replace(ticket, "")).strip()
    if len(said) < _LEAST_REASON:
        return [document.problem("/reason", "says nothing but the ticket; write why, in at least ten characters")]
    return []


@dataclass(frozen=True, slots=True)
class _Wrong:
    where: str
    message: str


def _grant(written: dict[str, Tree]) -> tuple[Action, Tree] | _Wrong:
    """Give the action of a grant and its item as resolved trees hold it."""
    actions = [action for action in Action if action in written]
    if len(actions) != 1:
        return _Wrong("", "says not exactly one of add, remove and value; write one grant for each")
    action, text = actions[0], written[actions[0]]
    folder, slash, _ = written["document"].partition("/")
    schema = load_schema(_KINDS[folder] if slash else "platform")
    order = find(order_of(schema), split(written["field"]))
    wanted: Action | None
    node: Node
    match order:
        case None:
            return _Wrong("/field", f"is no field of {schema.kind} documents that can be loosened; correct it")
        case Keyed(removing=removing):
            wanted = Action.REMOVE if removing else Action.ADD
            node = {"x-format": order.node["x-keys"]} if "x-keys" in order.node else {}
        case Leaf(rule=rule, node=leaf):
            wanted = rule.action
            node = leaf.get("items", {}) if isinstance(rule, Covered) else leaf
        case _:
            assert_never(order)
    if wanted is None:
        return _Wrong("/field", "needs no signed reason: every change of it applies at once; leave it out")
    if order.approvals >= NEVER_APPROVED:
        return _Wrong("/field", "is never loosened, whoever signs; leave it out")
    if action is not wanted:
        return _Wrong(f"/{action}", f"is not how this field loosens; write `{wanted}:` instead of `{action}:`")
    kinds = node.get("type", "string")
    if wanted is Action.VALUE and not _is(text, kinds, node):
        return _Wrong(f"/{action}", "is no value that this field can have; write one that it can")
    item = canonical(node, text)
    if isinstance(item, formats.Bad):
        return _Wrong(f"/{action}", item.message)
    if isinstance(item, float) and item.is_integer():
        item = int(item)
    advice = out_of_bounds(node, item)
    return _Wrong(f"/{action}", advice) if advice is not None else (action, item)


def _is(value: Tree, kinds: str | list[str], node: Node) -> bool:
    if "enum" in node:
        return any(value == one and type(value) is type(one) for one in node["enum"])
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    name = names.get(type(value))
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    return name in wanted or (name == "integer" and "number" in wanted)


def judge(
    statement: Statement, terms: Terms, *, now: float, admitted_at: float, revoked: frozenset[str]
) -> ReasonRefused | None:
    """Say why a well-formed, well-signed statement does not count on this host now; None: it counts.

    `now` and `admitted_at` (of the first admission, or now) are Unix seconds; `revoked` are statement ids.
    """
    if not statement.addresses(terms.host):
        return ReasonRefused(OTHER_HOST, f"is for other hosts ({', '.join(statement.audience)}), not for {terms.host}")
    if statement.id in revoked:
        return ReasonRefused("id_revoked", f"is revoked by its id {statement.id}: write a new one with a new id")
    if statement.expires is not None and now >= statement.expires:
        return ReasonRefused("expired", "has expired: set a later expires and a new id, then sign; or delete it")
    if not re.fullmatch(terms.ticket_pattern, statement.ticket):
        return ReasonRefused("ticket", f"names a ticket that does not match this host's pattern {terms.ticket_pattern}")
    if terms.max_age is not None:
        if statement.expires is None:
            return ReasonRefused("no_end", "never expires, and this host caps that (max_age): give it an end")
        if statement.expires - admitted_at > terms.max_age:
            days = terms.max_age / 86400
            return ReasonRefused("too_long", f"expires more than {days:g} days ahead (max_age): give it an earlier end")
    return None
