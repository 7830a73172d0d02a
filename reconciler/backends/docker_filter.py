"""Owns the system call filters of containers under runc, in the engine's own form; loads none.

Docker's own profile for a process without capabilities, without 32-bit calls: older engines let AF_VSOCK through, and
all of them the 32-bit socketcall, which no filter can look into. And without netlink, whose sockets hold memory that no
control group is charged for (docs/decisions/0014).
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NETLINK_ROUTE = 0
_FILE = Path(__file__).with_name("docker_seccomp.json")


@dataclass(frozen=True, slots=True)
class Filters:
    """`sandbox`: of the agent and its twin. `proxy`: the same, and it may ask the kernel for its own addresses."""

    sandbox: str
    proxy: str


def read() -> Filters:
    """Read the filter that is kept beside this file; the proxy's has one line more."""
    content: dict[str, Any] = json.loads(_FILE.read_text("ascii"))
    asking = {
        "names": ["socket"],
        "action": "SCMP_ACT_ALLOW",
        "args": [
            {"index": 0, "value": int(socket.AF_NETLINK), "op": "SCMP_CMP_EQ"},
            {"index": 2, "value": _NETLINK_ROUTE, "op": "SCMP_CMP_EQ"},
        ],
    }
    return Filters(_text(content), _text(content | {"syscalls": [*content["syscalls"], asking]}))


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))
