"""Owns `ringfence check`, `plan` and `effective`: what a policy directory says, and what it would change here."""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
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
from reconciler.config_pass import SETTLE_S, Evaluated, evaluate, trust_of
from reconciler.core import load
from reconciler.core.plan import ExitCode, Plan, emit_reason
from reconciler.core.plan import plan as plan_of
from reconciler.core.policy import Effective, in_force
from reconciler.core.validate import desired
from reconciler.host import Host
from reconciler.reason import Verifier
from reconciler.snapshot import Bounds, NotSettled, Snapshot, take
from reconciler.state import State, StateBroken, StateFile

REASON_LASTS = timedelta(days=90)
_REVISION = 19
"""Characters of a digest that people are shown."""


def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A policy directory.")],
    json: Json = False,
) -> None:
    """List every problem of a policy directory; needs no host and no rights. For pre-commit and CI."""
    snapshot = _snapshot(directory, load.Bounds().bytes)
    wanted = desired(snapshot.files)
    if json:
        say_json({"problems": [dataclasses.asdict(one) for one in wanted.problems], "ignored": list(wanted.ignored)})
        leave(Code.PROBLEMS if wanted.problems else Code.FINE)
    if wanted.problems:
        leave_with_problems(wanted.problems)
    for file in wanted.ignored:
        say(f"ignored: {file} is no document of ours")
    if wanted.empty:
        complain(f"{directory}: holds no policy document: platform.yaml, agents/NAME.yaml, egress/NAME.yaml")
        leave(Code.PROBLEMS)
    say(f"{len(wanted.documents)} documents, no problems")


def plan(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Else the host's policy directory.")] = None,
    host_config: HostConfig = HOST_CONFIG,
    against: Annotated[
        str | None,
        typer.Option(metavar="in-force|floor|DIR", help="What to compare with; else in-force where it is readable."),
    ] = None,
    emit: Annotated[
        Path | None, typer.Option("--emit-reason", metavar="FILE", help="Write the statement that is missing.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for --emit-reason.")] = "FILL IN",
    ticket: Annotated[str | None, typer.Option(help="For --emit-reason; else the name of its file.")] = None,
    json: Json = False,
) -> None:
    """Show what a policy directory would change: what applies at once, what is signed for, what would be held.

    Exits 0 nothing to do, 2 changes, 3 weakenings that nobody signed, 1 problems. Changes nothing.
    """
    host = host_settings(host_config)
    evaluated = _evaluate(host, directory or host.policy, _base(host, against))
    found = _plan(evaluated)
    if json:
        say_json(found.to_json())
    else:
        for line in found.lines():
            say(line)
        _show_refused(evaluated)
    if found.exit_code is ExitCode.UNSIGNED:
        statement = _statement(host, found, emit, ticket=ticket, reason=reason)
        if emit is not None:
            emit.write_text(statement, "utf-8")
            complain(f"wrote {emit}: say why in it, then `ringfence reason sign {emit} --key KEY`")
        elif not json:
            say(f"\nthe statement to sign (--emit-reason FILE writes it):\n\n{statement}")
    leave(found.exit_code)


def effective(
    agent: Annotated[str, typer.Argument(help="The agent.")],
    host_config: HostConfig = HOST_CONFIG,
    json: Json = False,
) -> None:
    """Show what is in force for one agent on this host: its lists, the organisation's layers, limits, reasons."""
    host = host_settings(host_config)
    state = stored(host)
    if state.memory.in_force is None:
        complain("no policy was ever accepted on this host: every job is refused")
        leave(Code.PROBLEMS)
    held = in_force(state.memory.in_force, revision=state.revision, generation=state.generation)
    one = held.agents.get(agent)
    if one is None:
        known = ", ".join(sorted(held.agents)) or "none"
        complain(f"no agent {agent!r} is in force: its jobs are refused; agents in force: {known}")
        leave(Code.PROBLEMS)
    if json:
        say_json({"revision": held.revision, "enabled": held.platform.enabled, **_effective_json(one)})
        return
    say(f"agents/{agent}, revision {held.revision}, sandboxes are {'on' if held.platform.enabled else 'off'}")
    for line in effective_lines(one):
        say(line)


def effective_lines(one: Effective) -> list[str]:
    """What is in force for one agent, for people; the dry run of a job prints the same."""
    agent, limits = one.agent, one.agent.limits
    lines = [
        f"  image {agent.image}, isolation at least {agent.minimum_isolation}, uid {agent.user} inside",
        f"  allow {_list(agent.allow)}",
        f"  deny  {_list(agent.deny)}",
    ]
    for layer in one.layers:
        default = "everything public" if layer.default_allow else "nothing"
        lines.append(f"  and egress/{layer.name}: {default}, allow {_list(layer.allow)}, deny {_list(layer.deny)}")
        if layer.deny_ranges:
            lines.append(f"      never an address in {', '.join(layer.deny_ranges)}")
    lines += [
        f"  submitters {_list(agent.submitters)}; variables {_list(agent.env_allow)}; secrets {_list(agent.secrets)}",
        f"  limits {', '.join(f'{name} {value}' for name, value in dataclasses.asdict(limits).items())}",
        f"  signed reasons in use: {_list(one.reasons)}",
    ]
    if one.blocked:
        lines.append(f"  does not launch: no value is in force for {', '.join(one.blocked)}")
    return lines


def _list(items: object) -> str:
    return ", ".join(str(item) for item in items) or "none"  # type: ignore[attr-defined]  # any iterable


def _effective_json(one: Effective) -> dict[str, object]:
    agent = one.agent
    return {
        "agent": agent.name,
        "image": agent.image,
        "minimum_isolation": agent.minimum_isolation.value,
        "user": agent.user,
        "allow": [str(entry) for entry in agent.allow],
        "deny": [str(entry) for entry in agent.deny],
        "layers": [
            {
                "document": f"egress/{layer.name}",
                "default": "allow" if layer.default_allow else "deny",
                "allow": [str(entry) for entry in layer.allow],
                "deny": [str(entry) for entry in layer.deny],
                "deny_ranges": list(layer.deny_ranges),
            }
            for layer in one.layers
        ],
        "submitters": list(agent.submitters),
        "env": list(agent.env_allow),
        "secrets": sorted(agent.secrets),
        "limits": dataclasses.asdict(agent.limits),
        "blocked": list(one.blocked),
        "reasons": list(one.reasons),
    }


def _snapshot(directory: Path, size: int) -> Snapshot:
    snapshot = take(directory, owner=str(os.geteuid()), bounds=Bounds(files=20_000, bytes=size), deadline=SETTLE_S)
    if isinstance(snapshot, NotSettled):
        complain(f"{directory}: {snapshot.message}")
        leave(Code.PROBLEMS)
    return snapshot


def _evaluate(host: Host, directory: Path, base: State) -> Evaluated:
    return evaluate(
        _snapshot(directory, host.max_bytes),
        trust_of(host),
        base,
        now=SystemClock(base.last_seen).now(),
        host=host,
        verifier=Verifier(),
    )


def _plan(evaluated: Evaluated) -> Plan:
    found = plan_of(evaluated.outcome, evaluated.desired, revision=evaluated.in_force.revision)
    return dataclasses.replace(found, problems=evaluated.problems, alarm=evaluated.alarm)


def _base(host: Host, against: str | None) -> State:
    """What the plan compares with."""
    match against:
        case "floor":
            return State()
        case "in-force":
            return stored(host)
        case None:
            readable = os.access(StateFile(host.state).path, os.R_OK)
            return stored(host) if readable else State()
        case directory:
            return _evaluate(host, Path(directory), State()).state


def stored(host: Host) -> State:
    """What the daemon of this host remembers; ends the command when that cannot be read."""
    state = StateFile(host.state).load()
    if isinstance(state, StateBroken):
        complain(f"what is in force cannot be read (are you root?): {state.message}")
        leave(Code.PROBLEMS)
    return state


def _statement(host: Host, found: Plan, emit: Path | None, *, ticket: str | None, reason: str) -> str:
    name = ticket or (emit.stem if emit is not None else "TICKET-1")
    return emit_reason(
        found.missing,
        identifier=f"{name}.1",
        audience=[host.name],
        expires=(SystemClock().now() + REASON_LASTS).strftime("%Y-%m-%dT00:00:00Z"),
        ticket=name,
        reason=reason,
    )


def _show_refused(evaluated: Evaluated) -> None:
    for refusal in evaluated.admissions.refused:
        say(f"refused  {refusal}")
    for one in evaluated.admissions.admitted:
        signers = ", ".join(approval.signer for approval in one.approvals)
        say(f"admitted {one.statement.id} ({one.statement.ticket}), signed by {signers}")
