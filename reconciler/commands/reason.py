"""Owns `ringfence reason`: writes a statement to fill in, signs one, and says whether one would count here."""

from __future__ import annotations

import getpass
import math
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from reconciler.admission import admit
from reconciler.clock import SystemClock
from reconciler.commands.console import (
    HOST_CONFIG,
    Code,
    HostConfig,
    complain,
    host_settings,
    leave,
    leave_with_problems,
    say,
)
from reconciler.commands.policy import REASON_LASTS
from reconciler.commands.statements import FOLDER, other_host, write_new
from reconciler.config_pass import trust_of
from reconciler.core.load import Problem
from reconciler.core.plan import emit_reason
from reconciler.core.sshsig import Signature
from reconciler.core.statement import UNFILLED, ReasonRefused, Terms
from reconciler.core.statement import read as read_statement
from reconciler.core.trust import NAMESPACE, PRINCIPAL, Trust, TrustBroken
from reconciler.core.written import grant_text
from reconciler.host import Host, load_host
from reconciler.reason import Verifier, choose_signer
from reconciler.reason import sign as sign_statement

Statement = Annotated[Path, typer.Argument(metavar="STATEMENT.yaml", help="The statement, reasons/NAME.yaml.")]

_EXAMPLES = """\
  # one line a grant, such as
  # - {document: agents/helper, field: /allow, add: api.vendor.com}
  # - {document: agents/helper, field: /limits/memory, value: 1GiB}
  # - {document: egress/org, field: /deny, remove: files.vendor.com}
"""


def first_statement(host: str, expires: str) -> str:
    """The statement that switches a new host on."""
    reason = "sandboxes are switched on for this host"
    head = emit_reason((), identifier="FIRST-1.1", audience=[host], expires=expires, ticket="FIRST-1", reason=reason)
    return f"{head}  - {{document: platform, field: /enabled, value: true}}\n"


def new(
    statement: Statement,
    ticket: Annotated[str | None, typer.Option(help="Else the name of the file.")] = None,
    audience: Annotated[str, typer.Option(help="A host name or a glob.")] = "*",
    reason: Annotated[str, typer.Option(help="Why; at least ten characters that are not the ticket.")] = UNFILLED,
) -> None:
    """Write a statement to fill in. `ringfence plan --emit-reason` writes one that lists what a change needs."""
    expires = (SystemClock().now() + REASON_LASTS).strftime("%Y-%m-%dT00:00:00Z")
    name = ticket or statement.stem
    head = emit_reason((), identifier=f"{name}.1", audience=[audience], expires=expires, ticket=name, reason=reason)
    write_new(statement, head + _EXAMPLES)
    say(f"wrote {statement}: list its grants and say why, then `ringfence reason sign {statement} --key KEY`")


def sign(
    statement: Statement,
    key: Annotated[Path, typer.Option(help="The private key; or the public one, whose other half an agent holds.")],
    signer: Annotated[str | None, typer.Option(help="Your name in allowed_signers; else your user name.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace your signature beside it; what the old one licenses may be live.")
    ] = False,
    host_config: HostConfig = HOST_CONFIG,
) -> None:
    """Check a statement, show what it licenses, and write its signature beside it.

    Where this host's settings can be read, the key must be that signer's.
    """
    name = signer or getpass.getuser()
    if not PRINCIPAL.fullmatch(name):
        raise typer.BadParameter("write the plain name that allowed_signers has for you", param_hint="--signer")
    read = read_statement(str(statement), _bytes(statement))
    if isinstance(read, tuple):
        leave_with_problems(read)
    now = SystemClock().now()
    if read.expires is not None and read.expires <= now.timestamp():
        complain(f"{statement} has expired: set a later expires and a new id, then sign")
        leave(Code.PROBLEMS)
    out = statement.with_name(f"{statement.stem}.{name}.sig")
    if os.path.lexists(out) and not force:
        complain(f"{out} is there already, and what it licenses may be live: --force replaces it")
        leave(Code.PROBLEMS)
    host = _host(host_config)
    trust = None if host is None else trust_of(host)
    if isinstance(trust, TrustBroken):
        complain(f"whether this key is {name}'s was not looked at: {trust.problems[0]}")
        trust = None
    refused = sign_statement(
        statement, key, out, accept=lambda made: None if trust is None else _own_key(made, name, trust, at=now)
    )
    if isinstance(refused, ReasonRefused):
        complain(f"{statement} {refused.message}")
        leave(Code.PROBLEMS)
    say(f"{read.id} licenses, on {', '.join(read.audience)}:")
    for grant in read.grants:
        say(f"  {grant_text(grant)}")
    say(f"signed as {name} in {out}")
    if host is not None and not read.addresses(host.name):
        complain(f"it licenses nothing here: {other_host(read, host.name)} again")


def _host(host_config: Path) -> Host | None:
    """Give this host's settings, where it has any that can be read: who signs elsewhere needs none."""
    host = load_host(host_config)
    if not isinstance(host, tuple):
        return host
    if host_config != HOST_CONFIG or os.path.lexists(host_config):
        complain(f"the signers of this host were not looked at: {host[0]}")
    return None


def _own_key(made: Signature, name: str, trust: Trust, *, at: datetime) -> ReasonRefused | None:
    """Say why a signature is not one that `name` may give; None: it is."""
    own = ", ".join(one.key.fingerprint for one in trust.signers if one.principal == name)
    advice = f"{name}'s is {own}" if own else f"{name} has no line in allowed_signers"
    found = choose_signer(made, trust, at=at)
    if isinstance(found, ReasonRefused) and found.code != "unknown_key":
        return found
    whose = "no signer's" if isinstance(found, ReasonRefused) else f"{found.principal}'s"
    if isinstance(found, ReasonRefused) or found.principal != name:
        return ReasonRefused("wrong_key", f"was not signed: key {made.key.fingerprint} is {whose}; {advice}")
    return None


def mending(code: str, statement: Path, trust: Path) -> str | None:
    """Give the command that mends a refusal; None where only waiting or asking helps, as its message says."""
    sign_it = f"ringfence reason sign {statement} --key KEY --signer NAME"
    sign_again = f"{sign_it} --force"
    match code:
        case "crlf":
            return f"echo 'reasons/* -text' >> .gitattributes; sed -i 's/\\r$//' {statement}; {sign_again}"
        case "unknown_key" | "not_permitted" | "signer_expired" | "certificate" | "key_type":
            line = f'"NAME namespaces=\\"{NAMESPACE}\\" $(cut -d\' \' -f1,2 KEY.pub)"'
            only = "only if this key shall be a signer's from now on, as root"
            return f"with a signer's key: {sign_it}; {only}: echo {line} >> {trust / 'allowed_signers'}"
        case "key_revoked":
            return f"another signer: {sign_it}"
        case "no_signature":
            return sign_it
        case "expired":
            return f"edit expires and id of {statement}, then {sign_again}"
        case "id_revoked" | "duplicate_id":
            return f"edit the id of {statement}, then {sign_again}"
        case "no_end" | "too_long" | "ticket" | "bad_statement" | "statement_too_large":
            return f"edit {statement}, then {sign_again}"
        case "no_statement":
            return "git rm the signature, or give it the name of its statement"
        case "verifier_missing":
            return "apt-get install openssh-client"
        case "not_touched":
            return f"touch the key when it blinks: {sign_again}"
        case "trust_broken":
            return f"ringfenced --check, then edit {trust / 'allowed_signers'} or {trust / 'revoked'} as it says"
        case "timeout" | "verifier_failed" | "signer_not_yet_valid" | "other_host":
            return None
        case _:
            return sign_again


def verify(statement: Statement, host_config: HostConfig = HOST_CONFIG) -> None:
    """Say whether a statement with the signatures beside it would count on this host now, and what would mend it."""
    host = host_settings(host_config)
    trust = trust_of(host)
    if isinstance(trust, TrustBroken):
        leave_with_problems(trust.problems)
    beside = statement.parent.glob(f"{statement.stem}.*.sig")
    files = {f"reasons/{path.name}": _bytes(path) for path in (statement, *sorted(beside))}
    found = admit(
        files,
        trust,
        (),
        now=SystemClock().now(),
        terms=Terms(host=host.name, ticket_pattern=host.ticket_pattern, max_age=host.max_age),
        verifier=Verifier(budget=math.inf),
    )
    unsigned = read_statement(str(statement), files[f"reasons/{statement.name}"])
    for refusal in found.refused:
        if refusal.code == "no_signature" and isinstance(unsigned, tuple):
            leave_with_problems(unsigned)
        complain(f"{refusal}")
        if (command := mending(refusal.code, statement, host.trust)) is not None:
            complain(f"  mend it: {command}")
    for file in found.elsewhere:
        told = "" if isinstance(unsigned, tuple) else other_host(unsigned, host.name)
        complain(f"{file}: [other_host] {told} again")
    reasons = host.policy / FOLDER
    inside = os.path.realpath(statement.parent) == os.path.realpath(reasons)
    for one in found.admitted:
        counts = f"counts on {host.name}" if inside else f"would count on {host.name} once it is in {reasons}"
        say(f"{one.statement.id} ({one.statement.ticket}) {counts}")
        for approval in one.approvals:
            say(f"  signed by {approval.signer} with {approval.key}")
        for grant in one.grants:
            say(f"  {grant_text(grant)}")
    leave(Code.FINE if found.admitted else Code.PROBLEMS)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        leave_with_problems([Problem(str(path), 1, 1, "", f"cannot be read: {error.strerror}")])
