"""Owns running every case through one proxy, in namespaces of its own: one column of the comparison; prints nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from tests.proxy import examples
from tests.proxy.conformance.run import Seen, judge, prepared, scripted, send
from tests.proxy.conformance.table import ALLOW, Case
from tests.proxy.harness import Proxy
from tests.proxy.peers.peers import Peer, Place, Running, program
from tests.rig import Rig

if TYPE_CHECKING:
    from tests.proxy.pythons import Python

PORT: Final = 3300
_READY_S: Final = 10.0
FORGETS_S: Final = 1.2

Column = dict[str, list[str] | None]
"""By case: what was wrong, or None where the case asks for something that the proxy has no setting for."""


def changes(row: dict[str, Any]) -> dict[str, Any]:
    """Turn a row's policy into fields; what it leaves out is as with `ALLOW` alone."""
    wanted = dict(row.get("policy", {}))
    wanted["layers"] = [examples.layer(**layer) for layer in wanted.get("layers", [])]
    made = examples.policy(allow=ALLOW, **wanted)
    names = ("allow", "deny", "layers", "local_addresses", "nat64_prefixes", "connections", "client_secret")
    return {name: getattr(made, name) for name in names}


def ours(python: Python, loop: str, cases: list[Case]) -> Column:
    """Run every case through ours, by one Python and on one loop."""
    found: Column = {}
    with Rig() as rig, scripted(rig):
        first = examples.policy(allow=ALLOW)
        with Proxy(rig, first, arguments=["--loop", loop], program=python.proxy) as proxy:
            for case in cases:
                proxy.replace(**changes(case.row))
                found[case.id] = _one(rig, proxy.port, case, strict=True)
    return found


def peers(peer: Peer, cases: list[Case]) -> Column:
    """Run every case through a peer; one that keeps answers gets the time to forget them before a name changes."""
    found: Column = {}
    with Rig() as rig, scripted(rig):
        running = _started(rig, peer)
        try:
            for case in cases:
                if {"policy", "occupied"} & case.row.keys():
                    found[case.id] = None
                    continue
                if peer is Peer.SQUID and "names" in case.row:
                    time.sleep(FORGETS_S)
                if running.process.poll() is not None:
                    running.stop()
                    running = _started(rig, peer)
                found[case.id] = _one(rig, PORT, case, strict=False)
        finally:
            running.stop()
    return found


def _one(rig: Rig, port: int, case: Case, *, strict: bool) -> list[str]:
    rig.reset()
    with prepared(rig, case):
        rig.clear()
        try:
            seen = send(rig, port, case)
        except OSError as broken:
            # it broke while the case was being sent
            return [type(broken).__name__] if case.accept or strict else judge(case, Seen(statuses=[0]), strict=False)
    return judge(case, seen, strict=strict)


def _started(rig: Rig, peer: Peer) -> Running:
    place = Place(enter=rig.enter, directory=rig.directory / peer.name, resolver=rig.resolver, dns_ttl_s=1)
    running = Running(peer, place, PORT, program(peer, place, PORT, allow=ALLOW))
    end = time.monotonic() + _READY_S
    while True:
        try:
            rig.connect("127.0.0.1", PORT).close()
        except OSError:
            if time.monotonic() > end:
                running.stop()
                raise
            time.sleep(0.02)
        else:
            return running
