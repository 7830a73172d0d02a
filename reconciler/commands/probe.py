"""Owns `ringfence probe` and `ringfence reap`: what this host really has, and removing what a killed daemon left."""

from __future__ import annotations

import os
from typing import assert_never

import anyio
from loguru import logger

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
from reconciler.core.choose import Available, Missing, Probe, not_in_this_version
from reconciler.core.policy import BackendName
from reconciler.daemon import built_in, open_parts
from reconciler.host import Host
from reconciler.prepare import owner_of


def probe(host_config: HostConfig = HOST_CONFIG, json: Json = False) -> None:
    """Say which backends this host really has, by a canary run of each. Leaves nothing."""
    host = host_settings(host_config)
    _must_be_root()
    _quiet()
    found = anyio.run(_probe, host)
    if json:
        say_json({"backends": [_to_json(one) for one in found]})
        return
    rows = []
    for one in found:
        match one:
            case Available():
                versions = ", ".join(f"{name} {text}" for name, text in one.versions.items())
                rows.append((one.backend.value, "available", one.isolation.value, versions))
            case Missing():
                rows.append((one.backend.value, "missing", one.code, one.message))
            case _:
                assert_never(one)
    table(("backend", "state", "isolation or code", "versions or what to do"), rows)
    for one in found:
        if isinstance(one, Available):
            say(f"evidence for {one.backend}:")
            for line in one.evidence:
                say(f"  {line}")


def reap(host_config: HostConfig = HOST_CONFIG) -> None:
    """Finish what a daemon that was killed left behind: tear down its sandboxes, give its jobs their results."""
    host = host_settings(host_config)
    _must_be_root()
    parts = open_parts(host)
    if isinstance(parts, str):
        complain(f"nothing was reaped: {parts}")
        leave(Code.PROBLEMS)
    with parts.closing:
        anyio.run(parts.jobs.recover)
    say("nothing of an earlier daemon is left")


async def _probe(host: Host) -> tuple[Probe, ...]:
    """Probe under an owner of our own: a running daemon never reaps it, and it never reaps the daemon's."""
    backends = built_in(host, f"{owner_of(host)}-{os.getpid()}")
    found: list[Probe] = []
    for name in BackendName:
        backend = backends.get(name)
        if backend is None:
            found.append(not_in_this_version(name))
            continue
        found.append(await backend.probe())
        await backend.reap(frozenset())
    return tuple(found)


def _to_json(one: Probe) -> dict[str, object]:
    match one:
        case Available():
            return {
                "name": one.backend.value,
                "state": "available",
                "isolation": one.isolation.value,
                "versions": dict(one.versions),
                "evidence": list(one.evidence),
            }
        case Missing():
            return {"name": one.backend.value, "state": "missing", "code": one.code, "message": one.message}
        case _:
            assert_never(one)


def _must_be_root() -> None:
    if os.geteuid() != 0:
        complain("that makes namespaces and cgroups: run it as root")
        leave(Code.PROBLEMS)


def _quiet() -> None:
    """The library code logs for the daemon; here only what is wrong is worth a line."""
    logger.remove()
    logger.add(lambda line: complain(str(line).rstrip()), level="WARNING", format="{message}")
