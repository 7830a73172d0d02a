"""Owns what people and CI are told of one pass: changes, weakenings, what is held, and the statement to sign."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from reconciler.core.grants import Action
from reconciler.core.hostnames import unicode_form
from reconciler.core.units import TO_COME
from reconciler.core.written import shown, written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reconciler.core.findings import Change, Held, Step
    from reconciler.core.load import Problem, Tree
    from reconciler.core.reconcile import Outcome
    from reconciler.core.validate import Desired

VERSION = 1


class ExitCode(IntEnum):
    """What `ringfence plan` exits with; problems come first, then what nobody signed for."""

    NOTHING = 0
    PROBLEMS = 1
    CHANGES = 2
    UNSIGNED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One plan. `revision` is the digest of what is desired."""

    revision: str
    problems: tuple[Problem, ...]
    changes: tuple[Change, ...]
    held: tuple[Held, ...]
    unused: tuple[str, ...]
    ignored: tuple[str, ...]
    alarm: str | None

    @property
    def exit_code(self) -> ExitCode:
        """What to exit with."""
        if self.problems:
            return ExitCode.PROBLEMS
        if self.held:
            return ExitCode.UNSIGNED
        return ExitCode.CHANGES if self.changes else ExitCode.NOTHING

    @property
    def missing(self) -> tuple[Step, ...]:
        """Every step that no live grant licenses, once and sorted: what a statement has to list."""
        steps = {step.key: step for held in self.held for step in held.steps if not step.grants}
        return tuple(step for _, step in sorted(steps.items()))

    def to_json(self) -> dict[str, Tree]:
        """Give the plan for machines; values are as documents write them."""
        return {
            "version": VERSION,
            "kind": "plan",
            "revision": self.revision,
            "exit_code": int(self.exit_code),
            "alarm": self.alarm,
            "problems": [
                {"file": one.file, "line": one.line, "column": one.column, "where": one.where, "message": one.message}
                for one in self.problems
            ],
            "changes": [_change_json(change) for change in self.changes],
            "held": [_held_json(held) for held in self.held],
            "missing": [_grant_json(step) for step in self.missing],
            "unused_reasons": list(self.unused),
            "ignored": list(self.ignored),
        }

    def lines(self) -> Iterator[str]:
        """Give the plan for people, as plain lines."""
        yield f"revision {self.revision}"
        yield from (f"problem  {problem}" for problem in self.problems)
        if self.alarm is not None:
            yield f"alarm    {self.alarm}"
        for change in self.changes:
            yield from _told("weakens" if change.weakening else "changes", change, change.before, change.after)
            if change.weakening:
                reasons = ", ".join(change.grants) or "nothing that is known"
                yield f"         licensed by {reasons} ({', '.join(change.signers)})"
        for held in self.held:
            yield from _told("held", held, held.after, held.wanted)
        if self.missing:
            yield "grants that are missing:"
            yield from (f"  - {_grant_yaml(step)}{_note(step)}" for step in self.missing)
        yield from (f"unused   {one}: nothing in force depends on it; delete or revoke it" for one in self.unused)
        yield from (f"ignored  {file}" for file in self.ignored)


def plan(outcome: Outcome, desired: Desired, *, revision: str) -> Plan:
    """Give the plan of one pass that `reconcile` worked out and that nobody applied yet."""
    return Plan(
        revision=revision,
        problems=desired.problems,
        changes=outcome.changes,
        held=outcome.held,
        unused=outcome.unused,
        ignored=desired.ignored,
        alarm=outcome.alarm,
    )


def emit_reason(
    missing: Iterable[Step], *, identifier: str, audience: Sequence[str], expires: str, ticket: str, reason: str
) -> str:
    """Write the whole statement to sign. `expires` is a UTC time as text, or `never`. Our own loader reads it."""
    lines = [
        "version: 1",
        "kind: signed-reason",
        f"id: {_text(identifier)}",
        f"audience: [{', '.join(_text(one) for one in audience)}]",
        f"expires: {_text(expires)}",
        f"ticket: {_text(ticket)}",
        f"reason: {_text(reason)}",
        "grants:",
    ]
    for step in missing:
        if step.approvals > 1:
            lines.append(f"  # needs signatures of {step.approvals} people")
        lines.append(f"  - {_grant_yaml(step)}")
    return "\n".join(lines) + "\n"


_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9._/-]*(?::[0-9]+)?")
_YAML_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def _text(text: str) -> str:
    """Write text so that YAML takes it for text and nothing else."""
    if _PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS:
        return text
    return json.dumps(text, ensure_ascii=False)


def _scalar(value: Tree) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _grant_yaml(step: Step) -> str:
    where = f"document: {_text(step.document)}, field: {_text(step.field)}"
    return f"{{{where}, {step.action}: {_scalar(step.value)}}}"


def _grant_json(step: Step) -> dict[str, Tree]:
    return {"document": step.document, "field": step.field, str(step.action): step.value}


def _note(step: Step) -> str:
    notes = []
    if step.witness:
        notes.append(f"now reachable: {step.witness}")
    if isinstance(step.value, str) and (name := unicode_form(step.value)):
        notes.append(f"reads {name}")
    if step.approvals > 1:
        notes.append(f"needs {step.approvals} signers")
    return f"  # {'; '.join(notes)}" if notes else ""


def _told(word: str, one: Change | Held, before: Tree, after: Tree) -> Iterator[str]:
    """Tell one finding: the field and its values, then each element by which it loosens and why that matters."""
    whom = f" (for {_whom(one.agents)})" if one.document.startswith("egress/") else ""
    if not one.field:
        what = "is new" if before is None else "is gone"
        yield f"{word:8} {one.document} {what}"
        return
    yield f"{word:8} {one.document} {one.field}{whom}: {shown(one.document, one.field, before, after)}"
    for step in one.steps:
        sign = {Action.ADD: "+", Action.REMOVE: "-", Action.VALUE: "="}[step.action]
        yield f"         {sign} {_scalar(step.value)}{_note(step)}"
    for why in dict.fromkeys(step.why for step in one.steps if step.why):
        yield f"         {why}"


def _whom(agents: Sequence[str]) -> str:
    """Say whom a finding of an egress document concerns."""
    present = [name for name in agents if name != TO_COME]
    if not present:
        return "agents to come"
    told = present[0] if len(present) == 1 else f"{len(present)} agents"
    return told if len(present) == len(agents) else f"{told} and those to come"


def _step_json(step: Step) -> dict[str, Tree]:
    return {
        "action": str(step.action),
        "value": step.value,
        "now_reachable": step.witness,
        "approvals": step.approvals,
        "why": step.why,
        "reasons": sorted({grant.id for grant in step.grants}),
    }


def _change_json(change: Change) -> dict[str, Tree]:
    return {
        "document": change.document,
        "field": change.field,
        "before": written(change.document, change.field, change.before),
        "after": written(change.document, change.field, change.after),
        "weakening": change.weakening,
        "agents": list(change.agents),
        "reasons": list(change.grants),
        "signers": list(change.signers),
        "tickets": list(change.tickets),
        "steps": [_step_json(step) for step in change.steps],
    }


def _held_json(held: Held) -> dict[str, Tree]:
    return {
        "document": held.document,
        "field": held.field,
        "before": written(held.document, held.field, held.before),
        "after": written(held.document, held.field, held.after),
        "wanted": written(held.document, held.field, held.wanted),
        "agents": list(held.agents),
        "steps": [_step_json(step) for step in held.steps],
    }
