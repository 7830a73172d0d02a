"""Owns `ringfence reason`: writes a statement to fill in, signs one, and says whether one would count here."""

from __future__ import annotations

import getpass
import math
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
from reconciler.commands.statements import write_new
from reconciler.config_pass import trust_of
from reconciler.core.load import Problem
from reconciler.core.plan import emit_reason
from reconciler.core.statement import UNFILLED, ReasonRefused, Terms
from reconciler.core.statement import read as read_statement
from reconciler.core.trust import NAMESPACE, PRINCIPAL, TrustBroken
from reconciler.core.written import grant_text
from reconciler.reason import Verifier
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
) -> None:
    """Check a statement, show what it licenses, and write its signature beside it."""
    name = signer or getpass.getuser()
    if not PRINCIPAL.fullmatch(name):
        raise typer.BadParameter("write the plain name that allowed_signers has for you", param_hint="--signer")
    read = read_statement(str(statement), _bytes(statement))
    if isinstance(read, tuple):
        leave_with_problems(read)
    out = statement.with_name(f"{statement.stem}.{name}.sig")
    refused = sign_statement(statement, key, out)
    if isinstance(refused, ReasonRefused):
        complain(f"{statement} {refused.message}")
        leave(Code.PROBLEMS)
    say(f"{read.id} licenses, on {', '.join(read.audience)}:")
    for grant in read.grants:
        say(f"  {grant_text(grant)}")
    say(f"signed as {name} in {out}")


def mending(code: str, statement: Path, trust: Path) -> str | None:
    """Give the command that mends a refusal; None where only waiting or asking helps, as its message says."""
    sign_again = f"ringfence reason sign {statement} --key KEY --signer NAME"
    new_id = f"edit the id of {statement}, then {sign_again}"
    match code:
        case "crlf":
            return f"echo 'reasons/* -text' >> .gitattributes; sed -i 's/\\r$//' {statement}; {sign_again}"
        case "unknown_key" | "not_permitted" | "signer_expired" | "certificate" | "key_type":
            line = f'"NAME namespaces=\\"{NAMESPACE}\\" $(cut -d\' \' -f1,2 KEY.pub)"'
            return f"as root: echo {line} >> {trust / 'allowed_signers'}, or another signer: {sign_again}"
        case "key_revoked":
            return f"another signer: {sign_again}"
        case "expired" | "id_revoked" | "duplicate_id":
            return new_id
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
    for refusal in found.refused:
        complain(f"{refusal}")
        if (command := mending(refusal.code, statement, host.trust)) is not None:
            complain(f"  mend it: {command}")
    for file in found.elsewhere:
        complain(f"{file}: [other_host] is for other hosts, not for {host.name}")
    for one in found.admitted:
        say(f"{one.statement.id} ({one.statement.ticket}) counts on {host.name}")
        for approval in one.approvals:
            say(f"  signed by {approval.signer} with {approval.key}")
        for grant in one.grants:
            say(f"  {grant_text(grant)}")
    leave(Code.FINE if found.admitted and not found.refused else Code.PROBLEMS)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        leave_with_problems([Problem(str(path), 1, 1, "", f"cannot be read: {error.strerror}")])
