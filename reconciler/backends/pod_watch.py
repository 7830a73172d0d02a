"""Owns the node guard where the daemon is not on the node: reads a node's agents off the cluster, over and over.

What the kernel is told, and how, is said elsewhere. It starts nothing and removes nothing in the cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from reconciler.backends import node_guard, pod_guard
from reconciler.backends.k8s_client import ClusterError, Kind
from reconciler.backends.labels import EXPIRES, OWNER, ROLE, RUN
from reconciler.backends.pod_guard import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Protocol

    from reconciler.backends.guard import GuardFailed

    class Pods(Protocol):
        """What lists pods of the namespace of sandboxes."""

        async def find(self, kind: Kind, *, labels: str = "", fields: str = "") -> list[Plain]:
            """List those that have these labels and fields."""


Plain = dict[str, Any]

LOOK_S = 0.5
"""Seconds between two looks: a gate waits for longer before it says that a fence does not hold."""
_OVER = frozenset({"Succeeded", "Failed"})
_GRACE_S, _LONGEST_S = 120, 14 * 86400
"""An element stays for so long after its run must be over, but never longer than two weeks."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look found: who must be fenced in until when (Unix seconds), and what is odd about it."""

    pods: tuple[Fenced, ...]
    until: float
    odd: tuple[str, ...]


def judge(agents: Iterable[Plain], proxies: Iterable[Plain], macs: Mapping[str, str | None]) -> Seen:
    """Say who must be fenced in: an agent whose proxy has no address yet, or whose run has two, reaches nothing.

    Args:
        agents: the agents' pods of one node, as the API server lists them.
        proxies: the proxies' pods of all nodes.
        macs: the MAC of the link of each agent's address; None or absent where it is not known.
    """
    ways: dict[tuple[str, str], list[str]] = {}
    for pod in proxies:
        if (address := address_of(pod)) is not None:
            ways.setdefault(_run(pod), []).append(address)
    found, odd, until = [], [], 0.0
    for pod in agents:
        address = address_of(pod)
        if address is None:
            continue
        own = ways.get(_run(pod), [])
        if len(own) > 1:
            odd.append(f"{_name(pod)}: its run has {len(own)} proxies, so it reaches none")
        mac = macs.get(address)
        if mac is None:
            odd.append(f"{_name(pod)}: the MAC of {address} is not known yet, so only what is routed is shut")
        found.append(Fenced(agent=address, mac=mac, proxy=own[0] if len(own) == 1 else None))
        until = max(until, _expires(pod))
    return Seen(tuple(found), until, tuple(odd))


def address_of(pod: Plain) -> str | None:
    """Give the IPv4 address that a pod has; None where it has none, or is over."""
    status = pod.get("status", {})
    address = status.get("podIP")
    if status.get("phase") in _OVER or not isinstance(address, str) or ":" in address:
        return None
    return address


def _labels(pod: Plain) -> Mapping[str, str]:
    labels: Mapping[str, str] = pod.get("metadata", {}).get("labels") or {}
    return labels


def _run(pod: Plain) -> tuple[str, str]:
    return _labels(pod).get(OWNER, ""), _labels(pod).get(RUN, "")


def _name(pod: Plain) -> str:
    return str(pod.get("metadata", {}).get("name", "a pod"))


def _expires(pod: Plain) -> float:
    text = _labels(pod).get(EXPIRES, "")
    return float(text) if text.isascii() and text.isdecimal() else 0.0


async def keep(cluster: Pods, node: str, *, now: Callable[[], float], said: Callable[[str], None]) -> None:
    """Keep this node's agents fenced in, for ever. Where the API server is not there, who is fenced in stays so.

    Args:
        cluster: whose pods.
        node: the name of the node that this runs on, in its network namespace.
        now: the time, in Unix seconds.
        said: takes a line whenever there is something new to say.
    """
    last: tuple[str, ...] | None = None
    known: dict[str, str | None] = {}
    while True:
        try:
            lines = await look(cluster, node, known, now=now())
        except ClusterError as error:
            lines = (f"the agents of this node cannot be listed, who is fenced in stays so: {error}",)
        if lines != last:
            for line in lines:
                said(line)
            last = lines
        await anyio.sleep(LOOK_S)


async def look(cluster: Pods, node: str, known: dict[str, str | None], *, now: float) -> tuple[str, ...]:
    """Look once, and have the kernel's sets hold what was seen; gives what there is to say.

    Args:
        cluster: whose pods.
        node: the node.
        known: the MACs of the addresses of earlier looks; brought up to date.
        now: Unix seconds.

    Raises:
        ClusterError: the pods cannot be listed.
    """
    agents = await cluster.find(Kind.POD, labels=f"{ROLE}=agent", fields=f"spec.nodeName={node}")
    proxies = await cluster.find(Kind.POD, labels=f"{ROLE}=proxy") if agents else []
    return await anyio.to_thread.run_sync(_apply, agents, proxies, known, now)


def _apply(agents: list[Plain], proxies: list[Plain], known: dict[str, str | None], now: float) -> tuple[str, ...]:
    addresses = {address for pod in agents if (address := address_of(pod)) is not None}
    # Shut what is routed first: asking for a MAC takes its time.
    seen = judge(agents, proxies, known)
    failed = _fence(seen, now)
    for gone in known.keys() - addresses:
        del known[gone]
    asked = [address for address in sorted(addresses) if known.get(address) is None]
    for address in asked:
        known[address] = node_guard.mac_of(address)
    if asked:
        seen = judge(agents, proxies, known)
        failed = _fence(seen, now)
    if failed is not None:
        return (*failed.lines, *seen.odd)
    return (f"agents of this node that are fenced in: {len(seen.pods)}", *seen.odd)


def _fence(seen: Seen, now: float) -> GuardFailed | None:
    seconds = min(_LONGEST_S, max(0, round(seen.until - now)) + _GRACE_S)
    return node_guard.only(seen.pods, seconds=seconds, name=pod_guard.DAEMON_SET)
