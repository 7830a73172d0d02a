"""Owns what a gate is asked: the challenge, and which forbidden targets to try.

Pure; runs no gate and opens no listener.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from reconciler.core.gate_report import Target, TargetKind

if TYPE_CHECKING:
    from collections.abc import Sequence

_METADATA = (("169.254.169.254", 80), ("169.254.170.2", 80), ("fd00:ec2::254", 80))
"""Instance metadata and task credentials of the large clouds."""
_PUBLIC = (("1.1.1.1", 443), ("2606:4700:4700::1111", 443))
_DOCKER_DNS = ("127.0.0.11", 53)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What a gate waits for after a good report, where nobody else holds the command back: a file's whole text."""

    file: str
    text: str
    until: float
    """Unix seconds past which it gives up, and nothing starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one gate is asked, and the answer that proves the anchor."""

    proxy: str
    challenge: str
    answer: str = field(repr=False)
    targets: tuple[Target, ...]
    rounds: int
    interval: float
    budget: float
    interfaces: tuple[str, ...] = ("lo",)
    attempt: float = 0.5
    """Seconds that one target may stay silent before silence is what was seen."""
    authorization: str = field(default="", repr=False)
    """What the proxy wants to be shown before it answers; empty where the network already keeps others away."""
    settle: tuple[str, ...] = ()
    """Names of targets without arrivals to count, tried first until none answers: where policy comes late."""
    hold: Hold | None = None
    near: float = 0.5
    """The same for targets on this very host, where the gate has a control; far longer where that took long."""
    control: str | None = None
    """An address and port sure to answer, or to refuse, as fast as a leak would; None: there is none."""

    def to_object(self) -> dict[str, object]:
        """Give the gate's input as plain JSON values; the answer only as its digest."""
        return {
            "version": 1,
            "proxy": self.proxy,
            "challenge": self.challenge,
            "answer_sha256": hashlib.sha256(self.answer.encode("ascii")).hexdigest(),
            "rounds": self.rounds,
            "interval_s": self.interval,
            "budget_s": self.budget,
            "attempt_s": self.attempt,
            "near_s": self.near,
            "control": self.control,
            "interfaces": list(self.interfaces),
            **({"authorization": self.authorization} if self.authorization else {}),
            **({"settle": list(self.settle)} if self.settle else {}),
            **({} if self.hold is None else {"hold": asdict(self.hold)}),
            "targets": [
                {
                    "name": target.name,
                    "kind": target.kind.value,
                    "address": target.address,
                    "port": target.port,
                    "alive": target.alive,
                    "near": target.near,
                }
                for target in self.targets
            ],
        }


def answer(proof_key: bytes, challenge: str) -> str:
    """Give what only a holder of the proof key can say to `challenge`: lower-case hex of HMAC-SHA256 over its ASCII."""
    return hmac.new(proof_key, challenge.encode("ascii"), hashlib.sha256).hexdigest()


def targets(
    *,
    canaries: Sequence[Target],
    addresses: Sequence[str],
    nameservers: Sequence[tuple[str, int]],
    neighbours: Sequence[tuple[str, int]],
    inner_resolver: bool = False,
) -> tuple[Target, ...]:
    """List what a sandbox must not reach; only the canaries can be known to be alive.

    Args:
        canaries: the daemon's own listeners.
        addresses: every address of the host, for ICMP.
        nameservers: every resolver that the host or the proxy uses.
        neighbours: other live sandboxes' proxies.
        inner_resolver: whether Docker's own resolver is inside the fence: it may answer that it asked nobody.
    """
    outside = [address for address in addresses if not address.startswith("127.") and address != "::1"]
    echoed = [*outside, *(address for address, _ in _PUBLIC)]
    inner = (_DOCKER_DNS,) if inner_resolver else ()
    servers = dict.fromkeys(where for where in (*nameservers, _DOCKER_DNS) if where not in inner)
    listed = [
        *(_address("metadata", TargetKind.TCP, *where) for where in _METADATA),
        *(_address("public", TargetKind.TCP, *where) for where in _PUBLIC),
        *(_address("dns", kind, *where) for where in servers for kind in (TargetKind.DNS_TCP, TargetKind.DNS_UDP)),
        *(_address("dns", TargetKind.DNS_RELAY, *where) for where in inner),
        *(_address("neighbour", TargetKind.TCP, *where, near=True) for where in neighbours),
        *(
            _address("echo", kind, address, near=address in outside)
            for address in echoed
            for kind in (TargetKind.ICMP, TargetKind.ICMP_RAW)
        ),
        Target(name="packet socket", kind=TargetKind.PACKET, address="", port=None, alive=False),
        Target(name="vsock socket", kind=TargetKind.VSOCK, address="", port=None, alive=False),
    ]
    return tuple({target.name: target for target in (*canaries, *listed)}.values())


def bound(canaries: Sequence[Target]) -> tuple[Target, ...]:
    """Give the same listeners again, to be tried from a socket that is bound to the fence's link (socket(7))."""
    kinds = {TargetKind.TCP: TargetKind.TCP_BOUND, TargetKind.UDP: TargetKind.UDP_BOUND}
    return tuple(
        replace(canary, name=canary.name.replace(canary.kind, kinds[canary.kind], 1), kind=kinds[canary.kind])
        for canary in canaries
        if canary.kind in kinds and ":" not in canary.address and not canary.address.startswith("127.")
    )


def bound_to(address: str, port: int) -> Target:
    """Give a neighbour's listener to be tried from a socket that is bound to the fence's link."""
    return _address("neighbour", TargetKind.TCP_BOUND, address, port, near=True)


def _address(what: str, kind: TargetKind, address: str, port: int | None = None, *, near: bool = False) -> Target:
    where = address if port is None else f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return Target(name=f"{what} {kind}:{where}", kind=kind, address=address, port=port, alive=False, near=near)
