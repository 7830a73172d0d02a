"""Owns what one config pass finds: values that were read before in, everything that it would do out; writes nothing."""

from __future__ import annotations

import dataclasses
import gc
import math
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from reconciler.admission import Admission, Admissions, admit
from reconciler.config_rows import Events, Lapsed, rows_of
from reconciler.core import load
from reconciler.core.load import Problem
from reconciler.core.policy import InForce, in_force
from reconciler.core.reconcile import Outcome, reconcile
from reconciler.core.statement import Terms
from reconciler.core.trust import Trust, TrustBroken
from reconciler.core.validate import Desired, desired, document_of
from reconciler.snapshot import NotSettled, Snapshot
from reconciler.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reconciler.host import Host
    from reconciler.reason import Verifier
    from reconciler.state import State

_REMEMBER_TIME = timedelta(seconds=60)
"""How far the last time seen may lag behind on disk while nothing else changes."""
_SOON = timedelta(days=14)
_BETWEEN_COLLECTIONS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evaluated:
    """Everything that one pass found and would do. Nothing was written."""

    snapshot: Snapshot | NotSettled
    trust: Trust | TrustBroken
    desired: Desired
    admissions: Admissions
    outcome: Outcome
    in_force: InForce
    problems: tuple[Problem, ...]
    """Of documents, of files that were not read, and of the trust files."""
    events: Events
    """The audit rows that `apply` writes before anything takes effect."""
    state: State
    """What `apply` stores after the rows."""
    stale: bool
    """Whether `state` differs from what is stored."""
    expiry: datetime | None
    """When the next signed reason that counts expires."""

    @property
    def wake(self) -> datetime | None:
        """When a pass is due whatever happens: at the next expiry, and at once while signatures wait to be verified."""
        return self.state.last_seen if self.admissions.waiting else self.expiry

    @property
    def alarm(self) -> str | None:
        """Why nothing is loosened, or why what is in force is not what the directory says; None when all is well."""
        if isinstance(self.snapshot, NotSettled):
            return f"[{self.snapshot.code}] {self.snapshot.message}"
        if isinstance(self.trust, TrustBroken):
            return "nothing new is admitted until the trust files have no problems"
        return self.outcome.alarm

    @property
    def expiring(self) -> tuple[str, ...]:
        """Ids of statements that count and expire within 14 days."""
        limit = (self.state.last_seen or datetime.max.replace(tzinfo=UTC)) + _SOON
        found = [one.statement for one in self.admissions.admitted]
        return tuple(sorted(one.id for one in found if one.expires is not None and one.expires < limit.timestamp()))

    @property
    def inherited(self) -> tuple[str, ...]:
        """Ids of statements that count here only because they were admitted earlier: a fresh host would refuse them."""
        return tuple(sorted(one.statement.id for one in self.admissions.admitted if not one.fresh))


def evaluate(
    snapshot: Snapshot | NotSettled,
    trust: Trust | TrustBroken,
    state: State,
    *,
    now: datetime,
    host: Host,
    verifier: Verifier,
    previous: Evaluated | None = None,
) -> Evaluated:
    """Work out one pass over values that were read before; writes nothing, and runs only ssh-keygen.

    A directory that did not settle keeps what is in force, but for what expires or is revoked meanwhile.

    Args:
        snapshot: the policy directory.
        trust: the trust directory.
        state: what is remembered.
        now: the clock's time; the last time seen counts instead where that is later.
        host: settings.
        verifier: remembers signatures between passes.
        previous: an earlier pass, so that only what changed since is read, judged and compared again. What it did not
            have to do anew, it takes over: the answer is the same as without it.
    """
    with _rarely_collected():
        return _evaluated(snapshot, trust, state, now=now, host=host, verifier=verifier, previous=previous)


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Look for cycles rarely: a pass over a large estate makes millions of objects, and none of them is in one."""
    before = gc.get_threshold()
    gc.set_threshold(_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _evaluated(
    snapshot: Snapshot | NotSettled,
    trust: Trust | TrustBroken,
    state: State,
    *,
    now: datetime,
    host: Host,
    verifier: Verifier,
    previous: Evaluated | None,
) -> Evaluated:
    if state.last_seen is not None:
        now = max(now, state.last_seen)
    wanted, admissions = Desired(), Admissions()
    if isinstance(snapshot, Snapshot):
        wanted = desired_of(snapshot, host.max_bytes, None if previous is None else previous.desired)
        if wanted.empty:
            snapshot = NotSettled("empty", f"{host.policy} holds no policy document: that deletes nothing")
    if isinstance(snapshot, Snapshot):
        terms = Terms(host=host.name, ticket_pattern=host.ticket_pattern, max_age=host.max_age)
        admissions = admit(
            snapshot.files,
            trust,
            state.admissions,
            now=now,
            terms=terms,
            verifier=verifier,
            previous=None if previous is None else previous.admissions,
        )
    standing, memory = Standing.of(state.admissions, trust), state.memory
    if not isinstance(snapshot, Snapshot):
        # No statement was read: of those that are remembered counts what the trust files still bear out.
        left = standing.left(memory.grants)
        memory = memory if left is memory.grants else dataclasses.replace(memory, grants=left)
    outcome = reconcile(
        wanted,
        memory,
        admissions.grants,
        now=now.timestamp(),
        lapsed=trust.revoked_ids,
        previous=None if previous is None else previous.outcome,
    )
    if isinstance(snapshot, Snapshot):
        kept = tuple(one for admitted in admissions.admitted for one in admitted.admissions)
    else:
        live = {(grant.id, one.key) for grant in outcome.memory.grants for one in grant.approvals}
        kept = tuple(one for one in state.admissions if (one.id, one.key) in live)
    revision = snapshot.digest if isinstance(snapshot, Snapshot) else state.revision
    moved = outcome.tree != state.memory.in_force
    rows = rows_of(
        snapshot=snapshot,
        trust=trust,
        admissions=admissions,
        lapsed=_lapsed(standing, kept, admissions, settled=isinstance(snapshot, Snapshot)),
        outcome=outcome,
        state=state,
        now=now,
    )
    following = dataclasses.replace(
        state,
        revision=revision,
        commit=snapshot.commit if isinstance(snapshot, Snapshot) else state.commit,
        generation=state.generation + moved,
        last_seen=now,
        memory=outcome.memory,
        admissions=kept,
        refused=rows.refused,
        held=rows.held,
        trust=trust if isinstance(trust, Trust) else state.trust,
        alarm=rows.alarm,
    )
    late = state.last_seen is None or now - state.last_seen > _REMEMBER_TIME
    return Evaluated(
        snapshot=snapshot,
        trust=trust,
        desired=wanted,
        admissions=admissions,
        outcome=outcome,
        in_force=in_force(
            outcome.tree,
            outcome.memory.last,
            revision=revision,
            generation=following.generation,
            previous=None if previous is None else (previous.outcome.tree, previous.in_force),
        ),
        problems=_problems(wanted, trust),
        events=rows.events,
        state=following,
        stale=late or dataclasses.replace(following, last_seen=state.last_seen) != state,
        expiry=_expiry(outcome, now),
    )


def desired_of(snapshot: Snapshot, max_bytes: int, previous: Desired | None = None) -> Desired:
    """Give what the snapshot wants; a document that could not be read is a bad one, never one that is gone."""
    wanted = desired(snapshot.files, bounds=load.Bounds(bytes=max_bytes), previous=previous)
    refused = {one.file: document_of(one.file) for one in snapshot.refused}
    if not refused:
        return wanted
    problems = [Problem(one.file, 1, 1, "", f"[{one.code}] {one.message}") for one in snapshot.refused]
    # A platform.yaml that was refused is not missing: that is said once, and rightly.
    kept = [one for one in wanted.problems if not (one.file in refused and one.file not in snapshot.files)]
    return dataclasses.replace(
        wanted,
        bad=wanted.bad | {name for name in refused.values() if name is not None},
        problems=tuple(sorted({*kept, *problems})),
    )


def _lapsed(
    standing: Standing,
    kept: tuple[Admission, ...],
    admissions: Admissions,
    *,
    settled: bool,
) -> tuple[Lapsed, ...]:
    """Say which admissions count no more, and why."""
    live = {(one.sha256, one.key) for one in kept}
    refused = {one.sha256: one for one in admissions.refused}
    found = []
    for one in standing.found:
        if (one.sha256, one.key) in live:
            continue
        refusal = standing.ended(one) or refused.get(one.sha256)
        if refusal is not None:
            found.append(Lapsed(one, refusal.code, refusal.message))
        elif settled:
            found.append(Lapsed(one, "removed", "is not in the policy directory any more, or its signature is not"))
        else:
            found.append(Lapsed(one, "expired", "has expired"))
    return tuple(found)


def _problems(wanted: Desired, trust: Trust | TrustBroken) -> tuple[Problem, ...]:
    return (*wanted.problems, *(trust.problems if isinstance(trust, TrustBroken) else ()))


def _expiry(outcome: Outcome, now: datetime) -> datetime | None:
    ends = [grant.expires for grant in outcome.memory.grants if grant.expires is not None]
    soonest = min(ends, default=math.inf)
    if soonest == math.inf:
        return None
    return max(now, datetime.fromtimestamp(soonest, UTC))
