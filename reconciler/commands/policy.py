"""Owns `ringfence check` and `plan`: what a policy directory says, and what it would change here."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from reconciler.clock import SystemClock
from reconciler.commands.console import (
    HOST_CONFIG,
    Code,
    HostConfig,
    Json,
    complain,
    host_settings,
    leave,
    leave_with_problems,
    say,
    say_json,
)
from reconciler.commands.effective import stored
from reconciler.commands.past import replayed
from reconciler.commands.statements import checked, fresh_id, ids_of, rows, waiting, write_new
from reconciler.config_pass import SETTLE_S, snapshot_of, trust_of
from reconciler.core import load
from reconciler.core.memory import canonical_json as dump
from reconciler.core.plan import ExitCode, Plan, emit_reason
from reconciler.core.plan import plan as plan_of
from reconciler.core.statement import UNFILLED
from reconciler.core.trust import Trust, TrustBroken, read_trust_files
from reconciler.core.validate import misnamed
from reconciler.evaluate import Evaluated, desired_of, evaluate
from reconciler.host import Host, parse_host
from reconciler.reason import Verifier
from reconciler.revision import at_revision
from reconciler.snapshot import Bounds, NotSettled, Snapshot, take
from reconciler.state import State, StateFile

REASON_LASTS = timedelta(days=90)


def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A policy directory.")],
    json: Json = False,
) -> None:
    """List every problem of a policy directory; needs no host and no rights. For pre-commit and CI."""
    snapshot = _checkout(directory, load.Bounds().bytes)
    wanted = desired_of(snapshot, load.Bounds().bytes)
    found = checked(snapshot.files, wanted.statements, now=SystemClock().now())
    problems = sorted((*wanted.problems, *misnamed(snapshot.ignored, snapshot.files), *found.problems))
    if json:
        say_json(
            {
                "problems": [dataclasses.asdict(one) for one in problems],
                "ignored": list(snapshot.ignored),
                "expired": list(found.expired),
                "documents": len(wanted.documents),
                "statements": len(found.sound),
            }
        )
        leave(Code.PROBLEMS if problems else Code.FINE)
    for file in snapshot.ignored:
        say(f"ignored: {file} is no document of ours")
    for file in found.expired:
        say(f"expired: {file} grants nothing any more")
    if problems:
        leave_with_problems(problems)
    if wanted.empty:
        complain(f"{directory}: holds no policy document: platform.yaml, agents/NAME.yaml, egress/NAME.yaml")
        leave(Code.PROBLEMS)
    counts = [_counted(len(wanted.documents), "document")]
    counts += [_counted(len(found.sound), "statement")] if found.sound else []
    say(f"{', '.join(counts)}, no problems")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def plan(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Else the host's policy directory.")] = None,
    host_config: HostConfig = HOST_CONFIG,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="in-force|floor|DIR|REV", help="What to compare with; else in-force where it is readable, or floor."
        ),
    ] = None,
    trust: Annotated[
        Path | None, typer.Option(metavar="FILE", help="allowed_signers to go by, with --as-host; `revoked` beside it.")
    ] = None,
    as_host: Annotated[
        str | None, typer.Option(metavar="NAME", help="Plan for the host of this name, without its host.yaml: for CI.")
    ] = None,
    without_signer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show what lapses when this signer's keys are revoked.")
    ] = None,
    emit: Annotated[
        Path | None,
        typer.Option("--emit-reason", metavar="FILE", help="Write the statement that is missing. Writes only FILE."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for --emit-reason.")] = UNFILLED,
    ticket: Annotated[str | None, typer.Option(help="For --emit-reason; else the name of its file.")] = None,
    json: Json = False,
) -> None:
    """Show what a policy directory would change: what applies at once, what is signed for, what would be held.

    Exits 0 nothing to do, 2 changes, 3 weakenings that nobody signed, 1 problems. Changes nothing.
    """
    if (trust is None) != (as_host is None):
        raise typer.BadParameter("goes with --as-host NAME, and the other way round", param_hint="--trust FILE")
    there = _There.of_host(host_settings(host_config)) if as_host is None else _There.named(as_host, trust)
    snapshot, where = there.snapshot(directory), directory or there.host.policy
    base = _base(there, against, directory)
    evaluated = there.evaluate(snapshot, base)
    if without_signer is not None:
        evaluated = _without(there, snapshot, evaluated, without_signer)
    found = _plan(evaluated)
    otherwise = replayed(there.host, evaluated, base)
    statements = checked(snapshot.files, evaluated.desired.statements, now=SystemClock(base.last_seen).now())
    if json:
        say_json({**found.to_json(), "replayed": [dataclasses.asdict(one) for one in otherwise]})
    else:
        if against is None and there.here and _access(there.host) is _Access.MAY_NOT:
            say("compared with the floor: what is in force can be read by root only")
        for line in found.lines():
            say(line)
        for line in rows(evaluated.admissions, statements, host=there.host.name, directory=where):
            say(line)
        for one in otherwise:
            say(f"replayed {one}")
    if found.exit_code is ExitCode.UNSIGNED and without_signer is None:
        taken = ids_of(snapshot.files) | there.trust.revoked_ids
        statement = _statement(there.host, found, emit, ticket=ticket, reason=reason, taken=taken)
        compared = _statement(there.host, found, None, ticket=None, reason="compared only", taken=()).encode()
        unsigned = waiting(evaluated.admissions, statements, compared, host=there.host.name)
        if emit is not None:
            write_new(emit, statement)
            complain(f"wrote {emit}: say why in it, then `ringfence reason sign {emit} --key KEY`")
        elif not json and unsigned is None:
            say(f"\nthe statement to sign (--emit-reason FILE writes it):\n\n{statement}")
    elif emit is not None:
        problems = found.exit_code is ExitCode.PROBLEMS
        complain(f"nothing written: {'mend the problems first' if problems else 'nothing waits for a signature'}")
    leave(found.exit_code)


@dataclasses.dataclass(frozen=True, slots=True)
class _There:
    """The host that is planned for, who may sign there, and whether it is this one: only then has it a state."""

    host: Host
    trust: Trust | TrustBroken
    here: bool

    @classmethod
    def of_host(cls, host: Host) -> _There:
        """This host, as its settings say."""
        return cls(host, trust_of(host), here=True)

    @classmethod
    def named(cls, name: str, signers: Path | None) -> _There:
        """Another host, by its name and the signers that it trusts."""
        settings = f"version: 1\nkind: host\nname: {dump(name)}\n"
        host = parse_host("--as-host", settings.encode())
        if isinstance(host, tuple):
            leave_with_problems(host)
        revoked = None if signers is None else signers.with_name("revoked")
        found = read_trust_files(
            str(signers),
            _read(signers),
            str(revoked),
            b"" if revoked is None or not os.path.lexists(revoked) else _read(revoked),
        )
        return cls(host, found, here=False)

    def snapshot(self, directory: Path | None) -> Snapshot:
        """Read what is planned: the host's own directory as strictly as the daemon does, a checkout as it is."""
        if directory is None:
            if not self.here:
                raise typer.BadParameter("is needed with --as-host", param_hint="DIR")
            return _settled(self.host.policy, snapshot_of(self.host))
        return _checkout(directory, self.host.max_bytes)

    def evaluate(self, snapshot: Snapshot, base: State) -> Evaluated:
        """Work out a pass of that host."""
        now = SystemClock(base.last_seen).now()
        return evaluate(snapshot, self.trust, base, now=now, host=self.host, verifier=Verifier(budget=math.inf))


def _without(there: _There, snapshot: Snapshot, now: Evaluated, signer: str) -> Evaluated:
    """Plan what follows when a signer's keys are revoked, over what would be in force."""
    if not isinstance(there.trust, Trust):
        leave_with_problems(there.trust.problems)
    keys = {one.key.fingerprint for one in there.trust.signers if one.principal == signer}
    if not keys:
        known = ", ".join(sorted({one.principal for one in there.trust.signers})) or "nobody"
        raise typer.BadParameter(f"is no signer here; signers are {known}", param_hint="--without-signer")
    trust = dataclasses.replace(there.trust, revoked_keys=there.trust.revoked_keys | keys)
    return dataclasses.replace(there, trust=trust).evaluate(snapshot, now.state)


def _checkout(directory: Path, size: int) -> Snapshot:
    """Read a directory of which only is told: whose it is and who else could write to it decides nothing here."""
    bounds = Bounds(files=20_000, bytes=size)
    return _settled(directory, take(directory, owner=None, bounds=bounds, deadline=SETTLE_S))


def _settled(directory: Path, snapshot: Snapshot | NotSettled) -> Snapshot:
    if isinstance(snapshot, NotSettled):
        complain(f"{directory}: {snapshot.message}")
        leave(Code.PROBLEMS)
    return snapshot


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def _plan(evaluated: Evaluated) -> Plan:
    found = plan_of(evaluated.outcome, evaluated.desired, revision=evaluated.in_force.revision)
    problems, ignored = evaluated.problems, found.ignored
    if isinstance(evaluated.snapshot, Snapshot):
        ignored = evaluated.snapshot.ignored
        problems = tuple(sorted((*problems, *misnamed(ignored, evaluated.snapshot.files))))
    return dataclasses.replace(found, problems=problems, ignored=ignored, alarm=evaluated.alarm)


def _base(there: _There, against: str | None, directory: Path | None) -> State:
    """What the plan compares with: a state, or what would be in force with another directory or revision."""
    match against:
        case "floor":
            return State()
        case "in-force":
            if not there.here:
                raise typer.BadParameter("is not known of another host", param_hint="--against in-force")
            return stored(there.host)
        case None:
            return stored(there.host) if there.here and _access(there.host) is _Access.MAY else State()
        case _ if os.path.isdir(against):  # noqa: PTH112 - no name makes it raise
            return there.evaluate(_checkout(Path(against), there.host.max_bytes), State()).state
        case revision:
            where = directory or there.host.policy
            bounds = Bounds(files=there.host.max_files, bytes=there.host.max_bytes)
            snapshot = at_revision(where, revision, bounds=bounds)
            if isinstance(snapshot, NotSettled):
                complain(f"--against: {revision} is no directory, and {snapshot.message}")
                leave(Code.PROBLEMS)
            return there.evaluate(snapshot, State()).state


class _Access(Enum):
    """Whether this user may read what is in force."""

    MAY = "may"
    MAY_NOT = "may not"
    NOTHING = "there is nothing yet"


def _access(host: Host) -> _Access:
    path = StateFile(host.state).path
    try:
        path.stat()
    except PermissionError:
        return _Access.MAY_NOT
    except OSError:
        return _Access.NOTHING
    return _Access.MAY if os.access(path, os.R_OK, effective_ids=True) else _Access.MAY_NOT


def _statement(
    host: Host, found: Plan, emit: Path | None, *, ticket: str | None, reason: str, taken: Collection[str]
) -> str:
    name = ticket or (emit.stem if emit is not None else "TICKET-1")
    return emit_reason(
        found.missing,
        identifier=fresh_id(name, taken),
        audience=[host.name],
        expires=(SystemClock().now() + REASON_LASTS).strftime("%Y-%m-%dT00:00:00Z"),
        ticket=name,
        reason=reason,
    )
