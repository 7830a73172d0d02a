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
        typer.Option(metavar="DIGEST", help="Wait until this revision is in force and every live proxy has it."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long, for --wait.")] = 60.0,
    json: Json = False,
) -> None:
    """Show what is in force, what is held, which backends there are and what runs.

    With --wait exits 124 when the time is over first. `plan` prints the digest of a directory.
    """
    host = host_settings(host_config)
    if wait is not None and not re.fullmatch(r"(sha256:)?[0-9a-f]{12,64}", wait):
        raise typer.BadParameter("write a digest as `plan` prints it, or its first 12 digits", param_hint="--wait")
    if wait is not None and not _in_force(host, wait.removeprefix("sha256:"), time.monotonic() + timeout):
        complain(f"{wait} is not in force everywhere after {timeout:g} s")
        leave(Code.TIMEOUT)
    value = read_status(host)
    if value is None:
        complain(f"{host.status} is not there: ringfenced has not run on this host; start it")
        leave(Code.PROBLEMS)
    running: bool = value["running"]
    if json:
        say_json(value)
    else:
        _show(value, running=running)
    leave(Code.FINE if running else Code.PROBLEMS)


def _in_force(host: Host, digest: str, until: float) -> bool:
    """Wait until a revision is in force and acknowledged, or the time is over."""
    while True:
        value = read_status(host)
        if value is not None and value["running"]:
            policy = value["policy"]
            behind = [run for run in value["runs"] if run["generation"] < policy["generation"]]
            if (policy["revision"] or "").removeprefix("sha256:").startswith(digest) and not behind:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK_AGAIN_S)


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
    for name, lines in (("problem", policy["problems"]), ("held", policy["held"]), ("ignored", policy["ignored"])):
        for line in lines:
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
    say(f"{spool['waiting']} jobs wait; {claiming} {spool['message']}".rstrip())
    say(f"audit head {value['audit']['seq']}:{value['audit']['hash']}")
