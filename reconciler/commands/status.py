"""Owns `ringfence status`: shows what the daemon published; asks the daemon nothing, for it has no socket."""

from __future__ import annotations

import json as json_module
import os
from typing import Any

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


def status(host_config: HostConfig = HOST_CONFIG, json: Json = False) -> None:
    """Show what is in force, what is held, which backends there are and what runs."""
    host = host_settings(host_config)
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
