"""Owns the host guard, as text and as the kernel must show it back: a table of its own that fences our bridges in.

Pure; loads nothing. It is the second layer: on our bridges the host has no address to begin with.
"""

from __future__ import annotations

from typing import Final

from reconciler.backends import nft_table
from reconciler.backends.nft_table import Match, Table

FAMILY, TABLE = "inet", "ringfence_guard"
FENCE_LINKS = "rf*"
"""The bridges of fences: an agent and its proxy are on one."""
EGRESS_LINKS = "rx*"
"""The bridges over which proxies reach the world."""
NOWHERE = "192.0.2.1"
"""The nameserver that sandboxes are told (RFC 5737: nobody has it); an engine that forwards to it must not send."""
PROXY_PORT = 3128
_DNS_PORT = 53
_PRIORITY = -210
"""Before the chains of everybody else."""

_TCP_TO_PROXY: Match = ("tcp dport", PROXY_PORT)
_TCP_FROM_PROXY: Match = ("tcp sport", PROXY_PORT)
GUARD: Final = Table(
    family=FAMILY,
    name=TABLE,
    priority=_PRIORITY,
    chains={
        "input": (
            ((("iifname", FENCE_LINKS),), "drop"),
            # A proxy may ask a resolver that this host runs; nothing else here is for it.
            ((("iifname", EGRESS_LINKS), ("udp dport", _DNS_PORT)), "accept"),
            ((("iifname", EGRESS_LINKS), ("tcp dport", _DNS_PORT)), "accept"),
            ((("iifname", EGRESS_LINKS),), "drop"),
        ),
        "forward": (
            # Bridged frames come by here only where br_netfilter is on.
            ((("iifname", FENCE_LINKS), ("oifname", FENCE_LINKS), _TCP_TO_PROXY), "accept"),
            ((("iifname", FENCE_LINKS), ("oifname", FENCE_LINKS), _TCP_FROM_PROXY), "accept"),
            ((("iifname", FENCE_LINKS),), "drop"),
            ((("oifname", FENCE_LINKS),), "drop"),
            ((("ip daddr", NOWHERE),), "drop"),
        ),
        "output": (
            ((("oifname", FENCE_LINKS),), "drop"),
            ((("ip daddr", NOWHERE),), "drop"),
        ),
    },
)


def text() -> str:
    """Give the ruleset for `nft -f`: it replaces our table in one transaction and touches no other."""
    lines = [
        "#!/usr/sbin/nft -f",
        "# The host guard of ringfence: `ringfence guard print`. It replaces its own table and touches no other.",
        nft_table.text(GUARD),
    ]
    return "\n".join(lines)
