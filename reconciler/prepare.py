"""Owns what a launch is made of on this host: secrets, resolvers, keys and times; decides and launches nothing."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconciler.backends.base import Launch
from reconciler.core.job import RefusalCode, Refused
from reconciler.core.policy import proxy_policy
from reconciler.directory import Unsafe, open_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from proxy.policy import ProxyPolicy
    from reconciler.core.gate_report import GateReport
    from reconciler.core.job import Admitted
    from reconciler.core.policy import Effective
    from reconciler.host import Host

LAUNCH_BUDGET = 120.0
"""Seconds that building and proving a fence may take."""
STOP_GRACE = 30.0
"""Seconds that a stopped sandbox may take to end."""
_ROOT_ALONE = frozenset({0})
_MAX_SECRET = 64 * 1024
_DNS_PORT = 53

Resolvers = tuple[tuple[str, int], ...]
Door = tuple[str, int]
"""Address and port of a live sandbox's proxy."""


def read_secrets(files: Mapping[str, str]) -> dict[str, str] | Refused:
    """The values of an agent's secrets, by variable. One newline at the end of a file is not part of its value."""
    values: dict[str, str] = {}
    for variable, path in files.items():
        value = _secret(path)
        if isinstance(value, Refused):
            return Refused(value.code, f"the file of the agent's secret {variable} {value.message}")
        values[variable] = value
    return values


def _secret(path: str) -> str | Refused:
    def refused(message: str) -> Refused:
        return Refused(RefusalCode.SECRET_UNREADABLE, message)

    descriptor = open_file(path, _ROOT_ALONE)
    if isinstance(descriptor, Unsafe):
        return refused(f"cannot be trusted: {descriptor.message}")
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_mode & stat.S_IRWXO:
            return refused("is open to others: chmod 0600")
        data = file.read(_MAX_SECRET + 1)
    if len(data) > _MAX_SECRET:
        return refused(f"is larger than {_MAX_SECRET // 1024} KiB")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return refused("is not UTF-8")
    if "\0" in text:
        return refused("holds a NUL, which no variable can")
    return text.removesuffix("\n")


def resolvers_of(host: Host, resolv_conf: Path) -> Resolvers | Refused:
    """The DNS servers that proxies of this host ask: those of its settings, else those of resolv.conf."""
    named = tuple(_server(text) for text in host.resolvers)
    if named:
        return named
    try:
        text = resolv_conf.read_text("ascii", "replace")
    except OSError:
        text = ""
    words = [line.split() for line in text.splitlines()]
    found = tuple((line[1], _DNS_PORT) for line in words if len(line) > 1 and line[0] == "nameserver")
    # A zone id (fe80::1%eth0) names an interface; such a server is left to the host's settings to name.
    usable = tuple(server for server in found if "%" not in server[0])
    if not usable:
        message = f"no DNS server: set `resolvers` in host.yaml ({resolv_conf} names none)"
        return Refused(RefusalCode.NO_RESOLVER, message)
    return usable


def _server(text: str) -> tuple[str, int]:
    """`address:port` or `[address]:port`, as the host's settings were checked to be."""
    address, _, port = text.rpartition(":")
    return address.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """What the policies of one run's proxy have in common, whatever their generation. The key is kept out of `repr`."""

    run: str
    resolvers: Resolvers
    nat64_prefixes: tuple[str, ...]
    proof_key: bytes = field(repr=False)
    expires_at: float

    def policy(self, effective: Effective, revision: str, generation: int) -> ProxyPolicy:
        """The proxy's policy under one generation."""
        return proxy_policy(
            effective,
            run=self.run,
            generation=generation,
            revision=revision,
            resolvers=self.resolvers,
            nat64_prefixes=self.nat64_prefixes,
            proof_key=self.proof_key,
            expires_at=self.expires_at,
        )


def launch_of(
    admitted: Admitted,
    *,
    run: str,
    owner: str,
    environment: Mapping[str, str],
    proxy: ProxyPolicy,
    neighbours: Sequence[Door],
) -> Launch:
    """Everything that a backend needs to know of one run."""
    agent, job = admitted.effective.agent, admitted.job
    return Launch(
        run=run,
        owner=owner,
        agent=agent.name,
        image=agent.image,
        user=agent.user,
        command=job.command,
        environment=environment,
        input=job.input,
        limits=agent.limits,
        proxy=proxy,
        expires_at=proxy.expires_at,
        neighbours=tuple(neighbours),
    )


def door_of(report: GateReport) -> Door | None:
    """Where a sandbox's gate found its proxy; None where others could not ask for it.

    A proxy on a loopback is inside its own sandbox's network, and there others find their own.
    """
    address, _, port = str(report.anchor.get("address", "")).rpartition(":")
    try:
        found = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return None
    return None if found.is_loopback or not (port.isascii() and port.isdigit()) else (str(found), int(port))


def expiry(admitted: Admitted, now: float) -> float:
    """Unix seconds past which nothing of a run may exist that is launched `now`."""
    return now + LAUNCH_BUDGET + admitted.timeout + 2 * STOP_GRACE


def owner_of(host: Host) -> str:
    """The label of everything that this host's daemon creates: two daemons of one host never reap each other's."""
    name = re.sub(r"[^A-Za-z0-9.-]", "-", host.name).strip(".-")[:40] or "host"
    return f"{name}-{hashlib.sha256(os.fsencode(host.state)).hexdigest()[:8]}"
