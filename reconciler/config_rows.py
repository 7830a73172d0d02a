"""Owns which audit rows one config pass writes, and what is remembered so that none is written twice; writes none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reconciler.core.audit import Event, EventName
from reconciler.core.cut import canonical
from reconciler.core.trust import Trust, weakenings
from reconciler.core.written import grant_text, text, written
from reconciler.snapshot import NotSettled, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from reconciler.admission import Admission, Admissions, Admitted
    from reconciler.core.findings import Change, Held
    from reconciler.core.reconcile import Outcome
    from reconciler.core.trust import TrustBroken
    from reconciler.state import State

UNSIGNED = "unsigned"
_MOST = 1000
"""Rows of one pass that each tell of one refusal, or of one change that is held; the rest are counted in one."""


@dataclass(frozen=True, slots=True)
class Lapsed:
    """One admission that counts no more, and why."""

    admission: Admission
    code: str
    message: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Events:
    """The rows of one pass, made anew each time they are asked for: of a whole estate they are too many to keep."""

    make: Callable[[], Iterator[Event]]

    def __iter__(self) -> Iterator[Event]:
        return self.make()

    def __bool__(self) -> bool:
        return next(self.make(), None) is not None


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass in order, and what the state remembers of them."""

    events: Events
    refused: tuple[str, ...]
    held: Mapping[str, str]
    alarm: str | None


def rows_of(
    *,
    snapshot: Snapshot | NotSettled,
    trust: Trust | TrustBroken,
    admissions: Admissions,
    lapsed: tuple[Lapsed, ...],
    outcome: Outcome,
    state: State,
    now: datetime,
) -> Rows:
    """Say which rows a pass writes: trust first, then reasons, then what changed, then what is held."""
    settled = isinstance(snapshot, Snapshot)
    revision = snapshot.digest if isinstance(snapshot, Snapshot) else (state.revision or None)
    commit = snapshot.commit if isinstance(snapshot, Snapshot) else state.commit
    refused = tuple(f"{one.file} {one.code} {one.sha256}" for one in admissions.refused[:_MOST])
    if len(admissions.refused) > _MOST:
        refused += (_more(len(admissions.refused) - _MOST),)
    alarm = _alarm(snapshot, trust, outcome)
    held = _digests(outcome.held)
    before = state.admissions, state.refused, state.trust, state.held, state.alarm

    def make() -> Iterator[Event]:
        admitted, refusals, trusted, told, alarmed = before
        yield from _trust(trusted, trust)
        yield from _admitted(admissions.admitted, admitted, revision, commit)
        yield from _refused(admissions, refusals, revision, commit) if settled else ()
        yield from _lapsed(lapsed, revision, commit, now)
        yield from _updates(outcome.changes, revision, commit)
        yield from _held(outcome.held, held, told, revision, commit)
        yield from _alarms(alarm, alarmed, revision)

    return Rows(Events(make), refused if settled else state.refused, held, alarm)


def _trust(before: Trust | None, after: Trust | TrustBroken) -> Iterable[Event]:
    if not isinstance(after, Trust) or (before is not None and before.digest == after.digest):
        return
    wider = weakenings(before, after)
    yield Event(
        name=EventName.TRUST_UPDATE,
        actor="root",
        object="trust",
        outcome="applied",
        message="; ".join(wider) or "nothing more is let pass than before",
        before=None if before is None else _shown(before),
        after=_shown(after),
        weakening=bool(wider),
        detail={"weakenings": list(wider)},
    )


def _shown(trust: Trust) -> dict[str, list[str]]:
    return {
        "signers": [str(signer) for signer in trust.signers],
        "revoked": sorted([f"key {key}" for key in trust.revoked_keys] + [f"id {name}" for name in trust.revoked_ids]),
    }


def _admitted(
    admitted: tuple[Admitted, ...], before: tuple[Admission, ...], revision: str | None, commit: str | None
) -> Iterable[Event]:
    known = {(one.sha256, one.key) for one in before}
    for one in admitted:
        new = [admission for admission in one.admissions if (admission.sha256, admission.key) not in known]
        if not new:
            continue
        statement = one.statement
        yield Event(
            name=EventName.REASON_ADMITTED,
            actor=",".join(sorted({admission.signer for admission in new})),
            object=statement.id,
            outcome="admitted",
            message=statement.reason,
            revision=revision,
            detail={
                "file": one.file,
                "sha256": statement.sha256,
                "ticket": statement.ticket,
                "expires": _time(statement.expires),
                "keys": sorted(admission.key for admission in new),
                "grants": [grant_text(grant) for grant in statement.grants],
                "commit": commit,
            },
        )


def _refused(
    admissions: Admissions, told: tuple[str, ...], revision: str | None, commit: str | None
) -> Iterable[Event]:
    known = set(told)
    for one in admissions.refused[:_MOST]:
        if f"{one.file} {one.code} {one.sha256}" not in known:
            yield Event(
                name=EventName.REASON_REFUSED,
                actor=UNSIGNED,
                object=one.file,
                outcome="refused",
                code=one.code,
                message=one.message,
                revision=revision,
                detail={"sha256": one.sha256, "commit": commit},
            )
    more = len(admissions.refused) - _MOST
    if more > 0 and _more(more) not in known:
        yield _uncounted(EventName.REASON_REFUSED, "refused", more, "`ringfence plan` names them", revision)


def _uncounted(name: EventName, outcome: str, count: int, message: str, revision: str | None) -> Event:
    return Event(
        name=name,
        actor=UNSIGNED,
        object="*",
        outcome=outcome,
        message=f"{_more(count)}: {message}",
        revision=revision,
        detail={"count": count},
    )


def _more(count: int) -> str:
    return f"{count} more"


def _lapsed(lapsed: tuple[Lapsed, ...], revision: str | None, commit: str | None, now: datetime) -> Iterable[Event]:
    for one in lapsed:
        admission = one.admission
        yield Event(
            name=EventName.REASON_LAPSED,
            actor=admission.signer,
            object=admission.id,
            outcome="lapsed",
            code=one.code,
            message=one.message,
            revision=revision,
            detail={
                "sha256": admission.sha256,
                "key": admission.key,
                "ticket": admission.ticket,
                "admitted_at": _time(admission.admitted_at.timestamp()),
                "seen_at": _time(now.timestamp()),
                "commit": commit,
            },
        )


def _updates(changes: tuple[Change, ...], revision: str | None, commit: str | None) -> Iterable[Event]:
    for change in changes:
        yield Event(
            name=EventName.CONFIG_UPDATE,
            actor=",".join(change.signers) or UNSIGNED,
            object=f"{change.document}#{change.field}" if change.field else change.document,
            outcome="applied",
            revision=revision,
            before=written(change.document, change.field, change.before),
            after=written(change.document, change.field, change.after),
            weakening=change.weakening,
            detail={
                "document": change.document,
                "field": change.field,
                "agents": list(change.agents),
                "reasons": list(change.grants),
                "tickets": list(change.tickets),
                "commit": commit,
            },
        )


def _digests(held: tuple[Held, ...]) -> dict[str, str]:
    parts: dict[str, list[object]] = {}
    for one in held:
        parts.setdefault(one.document, []).append([one.field, one.after, one.wanted, list(one.agents)])
    return {document: hashlib.sha256(canonical(found)).hexdigest()[:32] for document, found in parts.items()}


def _held(
    held: tuple[Held, ...],
    digests: Mapping[str, str],
    told: Mapping[str, str],
    revision: str | None,
    commit: str | None,
) -> Iterable[Event]:
    """Give a row for each held change of a document whose held changes are not what they were, and for each release."""
    news = [one for one in held if told.get(one.document) != digests[one.document]]
    for one in news[:_MOST]:
        missing = [
            f"{step.document}#{step.field} {step.action} {text(step.document, step.field, step.value)}"
            for step in one.steps
            if not step.grants
        ]
        yield Event(
            name=EventName.CONFIG_HELD,
            actor=UNSIGNED,
            object=f"{one.document}#{one.field}" if one.field else one.document,
            outcome="held",
            code="unsigned" if missing else "alarm",
            message=f"waits for a signed reason that grants {'; '.join(missing)}"
            if missing
            else "waits for the alarm's end",
            revision=revision,
            before=written(one.document, one.field, one.after),
            after=written(one.document, one.field, one.wanted),
            weakening=True,
            detail={
                "document": one.document,
                "field": one.field,
                "agents": list(one.agents),
                "missing": missing,
                "commit": commit,
            },
        )
    if len(news) > _MOST:
        yield _uncounted(EventName.CONFIG_HELD, "held", len(news) - _MOST, "`ringfence plan` names them", revision)
    for document in sorted(told.keys() - digests.keys()):
        yield Event(
            name=EventName.CONFIG_HELD,
            actor=UNSIGNED,
            object=document,
            outcome="released",
            message="nothing of it is held any more",
            revision=revision,
            detail={"document": document, "commit": commit},
        )


def _alarm(snapshot: Snapshot | NotSettled, trust: Trust | TrustBroken, outcome: Outcome) -> str | None:
    if isinstance(snapshot, NotSettled):
        return f"[{snapshot.code}] {snapshot.message}"
    if not isinstance(trust, Trust):
        return f"nothing new is admitted: {trust.problems[0]}"
    return outcome.alarm


def _alarms(alarm: str | None, told: str | None, revision: str | None) -> Iterable[Event]:
    if alarm != told:
        yield Event(
            name=EventName.CONFIG_HELD,
            actor=UNSIGNED,
            object="policy",
            outcome="released" if alarm is None else "kept",
            code=None if alarm is None else "alarm",
            message=alarm or "the policy directory and the trust files can be gone by again",
            revision=revision,
        )


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
