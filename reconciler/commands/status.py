"""Owns `ringfence status`: shows what the daemon published; asks the daemon nothing, for it has no socket."""

from __future__ import annotations

import json as json_module
import os
import re
import time
from typing import Annotated, Any

import typer

from reconciler.commands.console import (
    HOST_CONFIG,
    Code,
    HostConfig,
    Json,
    complain,
    host_settings,
    leave,
    say,
    say_json,
    table,
)
from reconciler.host import Host

_LOOK_AGAIN_S = 0.1


def status(
    host_config: HostConfig = HOST_CONFIG,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST", help="Wait until this revision is settled and every live proxy has what counts."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long, for --wait.")] = 60.0,
    json: Json = False,
) -> None:
    """Show what is in force, what is held, which backends there are and what runs.

    With --wait: 0 all of that revision is in force, 3 weakenings of it are held, 1 a document of it has problems, 124
    the time is over first. `plan` prints the digest of a directory.
    """
    host = host_settings(host_config)
    if wait is not None and not re.fullmatch(r"(sha256:)?[0-9a-f]{12,64}", wait):
        raise typer.BadParameter("write a digest as `plan` prints it, or its first 12 digits", param_hint="--wait")
    value = read_status(host) if wait is None else _settled(host, wait, time.monotonic() + timeout)
    if value is None and wait is not None:
        complain(f"{wait} is not settled everywhere after {timeout:g} s")
        leave(Code.TIMEOUT)
    if value is None:
        complain(f"{host.status} is not there: ringfenced has not run on this host; start it")
        leave(Code.PROBLEMS)
    running: bool = value["running"]
    if json:
        say_json(value)
    else:
        _show(value, running=running)
    if wait is not None:
        _say_outcome(value["policy"])
        leave(_outcome(value["policy"]))
    leave(Code.FINE if running else Code.PROBLEMS)


def _settled(host: Host, digest: str, until: float) -> dict[str, Any] | None:
    """Wait until the daemon went by a revision and live proxies acknowledged; None: the time is over.

    Gives the very status that says so: one that is read afterwards may be of the next revision.
    """
    digest = digest.removeprefix("sha256:")
    while True:
        value = read_status(host)
        if value is not None and value["running"]:
            policy = value["policy"]
            behind = [run for run in value["runs"] if run["generation"] < policy["generation"]]
            if (policy["revision"] or "").removeprefix("sha256:").startswith(digest) and not behind:
                return value
        if time.monotonic() >= until:
            return None
        time.sleep(_LOOK_AGAIN_S)


def _outcome(policy: dict[str, Any]) -> Code:
    """Say how much of a revision is in force: a weakening that is held is no mistake, but it is not in force."""
    if policy["problems"]:
        return Code.PROBLEMS
    return Code.WEAKENINGS if policy["held"] else Code.FINE


def _say_outcome(policy: dict[str, Any]) -> None:
    """Tell people the same, on standard error: standard output is the status."""
    bad, held, problems = policy["bad"], policy["held"], policy["problems"]
    lacking = []
    if bad:
        lacking.append(f"{len(bad)} {'document' if len(bad) == 1 else 'documents'} with problems")
    if held:
        lacking.append(f"{len(held)} held")
    share = f"all but {' and '.join(lacking)}" if lacking else "all"
    if problems and not bad:
        share = "not all: see the problems"
    complain(f"revision {policy['revision']} is settled; in force of it: {share}")
    for document in bad:
        complain(f"{document}: has problems, so the document of the revision before stays, if there was one")


def read_status(host: Host) -> dict[str, Any] | None:
    """What the daemon published last, with `running`: whether it is still there; None before it ever ran."""
    try:
        value: dict[str, Any] = json_module.loads(host.status.read_bytes())
    except (OSError, ValueError):
        return None
    return {**value, "running": value["state"] != "stopped" and _alive(value["pid"])}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _show(value: dict[str, Any], *, running: bool) -> None:
    policy, spool = value["policy"], value["spool"]
    state = value["state"] if running else "not running"
    say(f"ringfenced on {value['host']}: {state}, pid {value['pid']}, {value['updated']}")
    say(f"in force: {policy['revision'] or 'nothing was ever accepted'}, generation {policy['generation']}")
    say(f"sandboxes are {'on' if policy['enabled'] else 'off'}; agents: {', '.join(policy['agents']) or 'none'}")
    for name, field in (("problem", "problems"), ("held", "held"), ("refused", "refused"), ("ignored", "ignored")):
        for line in policy[field]:
            say(f"{name}: {line}")
    if policy["unused"]:
        say(f"signed reasons that nothing uses, to delete or revoke: {', '.join(policy['unused'])}")
    table(
        ("backend", "state", "what"),
        ((one["name"], one["state"], one["isolation"] or one["message"] or "") for one in value["backends"]),
    )
    table(
        ("run", "agent", "submitter", "state", "since"),
        ((one["run"], one["agent"], one["submitter"], one["state"], one["since"]) for one in value["runs"]),
    )
    claiming = "claiming" if spool["claiming"] else "not claiming"
    say(f"{spool['waiting']} jobs wait; {claiming}{': ' if spool['message'] else ''}{spool['message']}")
    if spool["unknown"]:
        say(f"submitters that are no users of this host: {', '.join(spool['unknown'])}")
    say(f"audit head {value['audit']['seq']}:{value['audit']['hash']}")
