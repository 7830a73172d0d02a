"""Owns the gate of a fence in a cluster: what it is asked, and how what it says is judged; does not run it.

It is the init container of the agent's pod, so nobody stands between it and the command but what it waits for.
"""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconciler.backends import gate_targets, k8s_proof
from reconciler.backends.gate_targets import Hold, Question
from reconciler.backends.k8s_objects import START_FILE, START_FOLDER
from reconciler.backends.k8s_place import CANARY_PORT
from reconciler.backends.nft import PROXY_PORT
from reconciler.core.gate_report import GateReport, Target, TargetKind, judge

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reconciler.backends.base import Launch
    from reconciler.backends.k8s_place import Where

BUDGET_S = 30.0
_ROUNDS = 3
_INTERVAL_S = 1.5
"""Three rounds over three seconds: policy reaches a new pod's address late, and its datagrams later still."""
_ATTEMPT_S = 0.5
_KUBELET_PORTS = (10250, 10255)
_HOLD_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What a sandbox in a cluster must not reach.

    `nodes`: addresses of all nodes; `api`: where the API server is met; `servers`: DNS servers of the cluster and of
    this host; `canaries`: listeners of the daemon's own, where it is on a node; `settling`: which of them to settle by.
    """

    nodes: tuple[str, ...]
    api: tuple[tuple[str, int], ...]
    servers: tuple[tuple[str, int], ...]
    canaries: tuple[Target, ...] = ()
    settling: tuple[Target, ...] = ()


def question(where: Where, launch: Launch, *, proxy: str, around: Around, now: float) -> Question:
    """Give what the gate is asked.

    Args:
        where: the run's place.
        launch: the run.
        proxy: the address of the proxy's pod.
        around: what is there to be tried.
        now: Unix seconds.
    """
    challenge = secrets.token_hex(16)
    canary = _tcp("canary", proxy, CANARY_PORT, alive=True)
    services = tuple(
        dict.fromkeys([*around.api, *((node, port) for node in around.nodes for port in (*_KUBELET_PORTS, 6443))])
    )
    known = [_tcp("service", address, port) for address, port in services]
    own = {(proxy, PROXY_PORT)}
    return Question(
        proxy=f"[{proxy}]:{PROXY_PORT}" if ":" in proxy else f"{proxy}:{PROXY_PORT}",
        challenge=challenge,
        answer=gate_targets.answer(launch.proxy.proof_key, challenge),
        targets=gate_targets.targets(
            canaries=(canary, *known, *around.canaries),
            addresses=around.nodes,
            nameservers=around.servers,
            neighbours=[neighbour for neighbour in launch.neighbours if neighbour not in own],
        ),
        rounds=_ROUNDS,
        interval=_INTERVAL_S,
        budget=BUDGET_S,
        interfaces=("lo", "eth0"),
        attempt=_ATTEMPT_S,
        authorization="Basic " + base64.b64encode(f"run:{where.secret}".encode("ascii")).decode("ascii"),
        settle=tuple(target.name for target in (*known, *around.settling)),
        hold=Hold(file=f"{START_FOLDER}/{START_FILE}", text=where.start, until=now + _HOLD_S),
    )


def read(log: bytes) -> Mapping[str, object] | None:
    """Find the report in what a gate wrote; None while there is none."""
    for line in log.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("kind") == "gate-report":
            return said
    return None


def judged(where: Where, asked: Question, log: bytes, arrivals: Collection[str]) -> tuple[GateReport, tuple[str, ...]]:
    """Judge what a gate wrote, again and against what was asked; and what of its runtime is not as it must be.

    Args:
        where: the run's place.
        asked: the question.
        log: all that its container wrote.
        arrivals: names of targets, or peers, that arrived where nothing may.
    """
    report = judge(
        read(log),
        challenge=asked.challenge,
        answer=asked.answer,
        targets=asked.targets,
        arrivals=arrivals,
        rounds=asked.rounds,
        interfaces=asked.interfaces,
    )
    return report, k8s_proof.runtime(where, report.runtime.get("kernel"))


def _tcp(what: str, address: str, port: int, *, alive: bool = False) -> Target:
    shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return Target(name=f"{what} tcp:{shown}", kind=TargetKind.TCP, address=address, port=port, alive=alive)
