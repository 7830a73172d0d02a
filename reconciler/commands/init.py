"""Owns `ringfence init`: what a host needs before its first policy; replaces nothing that is there."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from reconciler.clock import SystemClock
from reconciler.commands.console import HOST_CONFIG, Code, HostConfig, complain, leave, leave_with_problems, say
from reconciler.commands.policy import REASON_LASTS
from reconciler.commands.reason import first_statement
from reconciler.config_pass import trust_of
from reconciler.core.sshsig import Malformed, parse_key_text
from reconciler.core.trust import NAMESPACE, PRINCIPAL, TrustBroken
from reconciler.host import Host, load_host

_PLATFORM = "version: 1\nkind: platform\nenabled: true\n"


def init(
    signer: Annotated[str, typer.Option(help="Who signs first: a plain name, such as alice.")],
    key: Annotated[Path, typer.Option(metavar="FILE.pub", help="That person's public key (ed25519, ecdsa or sk-).")],
    name: Annotated[str | None, typer.Option(help="The host's name for signed reasons; else its host name.")] = None,
    host_config: HostConfig = HOST_CONFIG,
) -> None:
    """Make host.yaml (or what --host-config names) and the directories that it names; what is there stays as it is.

    By default: /etc/ringfence/host.yaml; platform.yaml, agents/, egress/ and the first statement to sign,
    reasons/FIRST-1.yaml, in /etc/ringfence/policy; the first signer in /etc/ringfence/trust; /var/lib/ringfence and
    /var/spool/ringfence. Exits 1 where signers are there already and this one is not among them.
    """
    if not PRINCIPAL.fullmatch(signer):
        raise typer.BadParameter("write one plain name, such as alice", param_hint="--signer")
    line = _line(signer, key)
    if not host_config.exists():
        text = f"version: 1\nkind: host\nname: {name or socket.gethostname()}\n"
        _write(host_config, text, mode=0o644)
    host = load_host(host_config)
    if isinstance(host, tuple):
        leave_with_problems(host)
    _directories(host)
    _write(host.trust / "revoked", "", mode=0o644)
    signers = host.trust / "allowed_signers"
    _write(signers, line, mode=0o644)
    if not _is_signer(host, line):
        complain(f"{signers}: {signer} with that key is not in it: append this line:\n{line.rstrip()}")
        leave(Code.PROBLEMS)
    _write(host.policy / "platform.yaml", _PLATFORM, mode=0o644)
    statement = host.policy / "reasons" / "FIRST-1.yaml"
    expires = (SystemClock().now() + REASON_LASTS).strftime("%Y-%m-%dT00:00:00Z")
    _write(statement, first_statement(host.name, expires), mode=0o644)
    options = "" if host_config == HOST_CONFIG else f" --host-config {host_config}"
    say(f"next, where {signer}'s key is, with that file or a copy of it; its .sig belongs beside {statement}:")
    say(f"  ringfence reason sign {statement} --key {str(key).removesuffix('.pub')} --signer {signer}")
    say("then here:")
    say(f"  ringfence plan{options}")


def _line(signer: str, key: Path) -> str:
    try:
        words = key.read_text("ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        complain(f"{key}: cannot be read as a public key: {error}")
        leave(Code.PROBLEMS)
    parsed = parse_key_text(words[0], words[1]) if len(words) > 1 else Malformed("bad_key", "is no public key")
    if isinstance(parsed, Malformed):
        complain(f"{key} {parsed.message}: name the file that ends in .pub")
        leave(Code.PROBLEMS)
    return f'{signer} namespaces="{NAMESPACE}" {words[0]} {words[1]}\n'


def _is_signer(host: Host, line: str) -> bool:
    """Say whether the signer of this line of ours is one here; trust files with problems are for others to tell."""
    trust = trust_of(host)
    wanted = line.split()
    return isinstance(trust, TrustBroken) or any(
        one.principal == wanted[0] and str(one.key).split()[:2] == wanted[2:] for one in trust.signers
    )


def _directories(host: Host) -> None:
    plan = [
        (host.policy, 0o755),
        (host.policy / "agents", 0o755),
        (host.policy / "egress", 0o755),
        (host.policy / "reasons", 0o755),
        (host.trust, 0o755),
        (host.state, 0o700),
        (host.spool, 0o755),
    ]
    for path, mode in plan:
        if path.is_dir():
            continue
        try:
            path.mkdir(mode=mode, parents=True)
        except OSError as error:
            complain(f"{path}: cannot be made: {error.strerror}")
            leave(Code.PROBLEMS)
        say(f"made  {path}/")


def _write(path: Path, text: str, *, mode: int) -> None:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except FileExistsError:
        say(f"kept  {path}: it is there already")
        return
    except OSError as error:
        complain(f"{path}: cannot be written: {error.strerror}")
        leave(Code.PROBLEMS)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
    say(f"wrote {path}")
