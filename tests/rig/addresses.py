"""Owns the literal addresses of the rig; sends nothing to them.

All of them exist only inside the rig's two namespaces, which have no uplink.
"""

from __future__ import annotations

from typing import Final

HOST_V4: Final = "93.184.215.10"
"""Global looking, on the host's side of the link."""
HOST_PRIVATE: Final = "10.77.0.10"
"""Private, on the host's side of the link: a name may resolve to it while something listens there."""
HOST_V6: Final = "2606:2800:21f::10"
HOST_LINK_LOCAL: Final = "fe80::10"
HOST_LINK: Final = "up0"
HOST_ADDRESSES: Final = (HOST_V4, HOST_PRIVATE, HOST_V6)
"""What a workload could try to reach on the host, without loopback and without a scope."""

INTERNET_V4: Final = "93.184.215.1"
INTERNET_PRIVATE: Final = "10.77.0.1"
INTERNET_V6: Final = "2606:2800:21f::1"
INTERNET_LINK_LOCAL: Final = "fe80::1"
INTERNET_LINK: Final = "down0"

RESOLVER_V4: Final = "93.184.216.53"
RESOLVER_V6: Final = "2606:2800:220::53"
EXAMPLE: Final = ("93.184.216.34", "2606:2800:220::34")
DATABASE: Final = ("93.184.216.35", "2606:2800:220::35")
VENDOR: Final = ("93.184.216.36", "2606:2800:220::36")
FILES: Final = ("93.184.216.37", "2606:2800:220::37")
INDEX: Final = ("93.184.216.38", "2606:2800:220::38")
EVIL: Final = ("93.184.216.66", "2606:2800:220::66")
"""A host that is alive and that no list names."""
BLACK_HOLE: Final = "93.184.216.99"
"""Routed to the internet namespace, which neither has it nor answers for it: connecting times out."""

METADATA: Final = "169.254.169.254"
TASK_METADATA: Final = "169.254.170.2"
METADATA_V6: Final = "fd00:ec2::254"
PRIVATE: Final = ("10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd20:ce::254")
FORBIDDEN: Final = (METADATA, TASK_METADATA, METADATA_V6, *PRIVATE)
"""Forbidden by address; each has live listeners and a route, so that a negative test is worth something."""

ORIGINS: Final = (
    RESOLVER_V4,
    RESOLVER_V6,
    *EXAMPLE,
    *DATABASE,
    *VENDOR,
    *FILES,
    *INDEX,
    *EVIL,
    "1.1.1.1",
    "8.8.8.8",
    "2606:4700::1",
)

ECHO_PORTS: Final = (22, 5432, 6379, 8080, 8443)
BANNER_PORTS: Final = (25,)
"""The server speaks first, as SMTP does."""
UDP_PORTS: Final = (123, 443, 5353)
