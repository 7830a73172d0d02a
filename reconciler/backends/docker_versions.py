"""Owns what an engine's version says about it: which hazards of its networks and its resolver it has.

Pure. A version is never the only evidence: the bridge is looked at on the host, and the gate tries.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OLDEST_ENGINE = (20, 10, 0)
"""Older ones have no cgroup namespaces and no API 1.41."""
OLDEST_API, NEWEST_API = (1, 41), (1, 56)
"""What this backend was tried with; a newer engine is spoken to as the newest of these."""

_VERSION = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?:[-+~]\S*)?")
_ISOLATED_SINCE = (28, 0, 0)
_NO_DEFAULT_ROUTE_SINCE = (25, 0, 0)

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """What an engine does. `isolated`: it knows gateway modes, so that a bridge needs no address of the host."""

    isolated: bool
    resolver_forwards: bool
    """CVE-2024-29018: its resolver forwards from internal networks; closed by naming a server that is nowhere."""
    default_route: bool
    """Containers on an internal network get a default route to where the gateway would be."""


def parse(text: str) -> Version | None:
    """Read `29.8.0`, `20.10.24+dfsg1`, `28.0.0-rc.1`; None when it is no version."""
    found = _VERSION.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0))


def hazards(version: Version) -> Hazards:
    """Say what an engine of this version does. A candidate of a release counts as the release: the gate tries both."""
    return Hazards(
        isolated=version >= _ISOLATED_SINCE,
        resolver_forwards=not (
            version >= (26, 0, 0) or (25, 0, 5) <= version < (26, 0, 0) or (23, 0, 11) <= version < (24, 0, 0)
        ),
        default_route=version < _NO_DEFAULT_ROUTE_SINCE,
    )


def api(server: str, oldest_of_server: str) -> str | None:
    """Choose the API version to speak; None when there is none that both know."""
    newest, oldest = _api(server), _api(oldest_of_server or "1.24")
    if newest is None or oldest is None:
        return None
    chosen = min(newest, NEWEST_API)
    return None if chosen < max(oldest, OLDEST_API) else f"{chosen[0]}.{chosen[1]}"


def _api(text: str) -> tuple[int, int] | None:
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and major.isascii() and major.isdigit() and minor.isdigit() else None


def unsafe_runtime(arguments: tuple[str, ...]) -> str | None:
    """Name the first of a gVisor runtime's configured arguments that opens what it is there to close; None if none.

    `--network=host` gives the sandbox the kernel's own network stack, host-uds and host-fifo the host's sockets and
    pipes, raw sockets more than the command may have.
    """
    for number, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals and number + 1 < len(arguments) and not arguments[number + 1].startswith("-"):
            value = arguments[number + 1]
        opens = {
            "network": value not in ("sandbox", "none"),
            "host-uds": value != "none",
            "fsgofer-host-uds": value != "false",
            "host-fifo": value != "none",
            "net-raw": value != "false",
            "allow-packet-socket-write": value != "false",
            "allow-flag-override": value != "false",
        }
        if opens.get(name, name.startswith("TESTONLY")):
            return argument
    return None
