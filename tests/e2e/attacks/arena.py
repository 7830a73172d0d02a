"""Owns one round of attacks on one installation: a job that tries the whole table, beside a neighbour that works on.

Gives what each attack came to and all that arrived anywhere; whether it may is judged by whoever asks `defeats`.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.e2e import documents
from tests.e2e.attacks import neighbour
from tests.e2e.attacks.floods import FLOODS, KEPT, LIMITS
from tests.e2e.attacks.table import PORT, TUNNEL, Group, Open, Scene, attacks
from tests.e2e.listeners import Listeners, Target
from tests.rig import addresses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.e2e.attacks.control import Shown
    from tests.e2e.attacks.table import Attack
    from tests.e2e.installation import Installation

LISTED: Final = ("example.com", "*.example.com")
_ABSTRACT: Final = "ringfence-neighbour"
_POOL: Final = "10.202.0.0/26"
"""The first of what the docker backend gives its runs out of, unless host.yaml says otherwise."""
_WAIT_S: Final = 0.2
_ALLOWED_PACKETS: Final = frozenset(
    {
        ("udp", addresses.RESOLVER_V4, 53),
        *(("tcp", address, port) for address in (*addresses.EXAMPLE, *addresses.VENDOR) for port in (80, 443)),
    }
)
"""What proxies of this round have a reason to send; no attack goes there itself."""
_HOSTS: Final = re.compile(r'"Host", "([^"]*)"')


@dataclass(frozen=True, slots=True)
class Defeat:
    """One attack that came to something."""

    name: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round came to. `lines`: the workload's, by attack; `arrivals`: at any listener, or on the link."""

    table: tuple[Attack, ...]
    lines: Mapping[str, Mapping[str, Any]]
    arrivals: tuple[str, ...]
    asked: frozenset[str]
    result: Mapping[str, Any]
    neighbour: Mapping[str, Any]
    neighbour_said: tuple[str, ...]
    neighbour_decisions: tuple[tuple[str, str], ...]
    newcomer: Mapping[str, Any]
    floods: Mapping[str, Mapping[str, Any]]
    too_much: Mapping[str, int]
    answered_after_floods: bool
    left: tuple[str, ...]
    seconds: float

    def defeats(self, group: Group) -> list[Defeat]:
        """Give the attacks of a group that came to something by the workload's own words."""
        return [
            Defeat(attack.name, f"{self.lines[attack.name]}")
            for attack in self.table
            if attack.group is group and not failed(attack, self.lines[attack.name])
        ]

    def word(self, attack: Attack) -> str:
        """Say in a word or two what an attack came to."""
        line = self.lines[attack.name]
        detail = line["detail"]
        if "received" in detail and line["outcome"] == "reached":
            return _answer(attack, detail["received"])
        match line["outcome"]:
            case "denied":
                return f"{detail['status']} {detail['code']}"
            case "failed":
                return _short(str(detail.get("error", "")))
            case other:
                return str(other)


def _answer(attack: Attack, received: str) -> str:
    if attack.group is Group.PROXY:
        status = re.match(r"HTTP/1\.[01] ([0-9]{3} [^\r\n]*)", received)
        return status[1] if status else "closed"
    return f"DNS rcode {_rcode(received, attack)}"


def _short(error: str) -> str:
    """Cut an error down to its name: those of bound sockets say their device too."""
    return error.rpartition(": ")[2][:24] or "failed"


def failed(attack: Attack, line: Mapping[str, Any]) -> bool:
    """Say whether an attack came to nothing by the workload's own words; arrivals are asked elsewhere."""
    outcome, detail = line["outcome"], line["detail"]
    if outcome in {"failed", "denied", "silent"}:
        return True
    if outcome == "broken":
        return False
    received = str(detail.get("received", ""))
    if attack.group is Group.PROXY:
        # The proxy answers, or hands on what the one listed host answers: the origin says for whom it was asked.
        return set(_HOSTS.findall(received)) <= {"example.com"} and "evil" not in received.partition("\r\n\r\n")[0]
    # Docker's own resolver may answer that it asked nobody; that nobody was asked is seen at the resolvers.
    return attack.group is Group.NAMES and attack.opens is Open.FENCED and _rcode(received, attack) != 0


def _rcode(received: str, attack: Attack) -> int:
    """Read the code of a DNS answer (RFC 1035 section 4.1.1)."""
    at = 5 if attack.order.get("do") == "dns_tcp" else 3
    return ord(received[at]) & 0xF if len(received) > at else 0


def opens(attack: Attack, shown: Mapping[str, Shown]) -> bool:
    """Say whether an attack came to what it must in the open."""
    return attack.opens is Open.FENCED or (attack.name in shown and shown[attack.name].holds(attack))


def names() -> tuple[Attack, ...]:
    """Give the table as it reads, for no place in particular."""
    ports = {"tcp": 1, "udp": 1, "icmp": None, "unix_abstract": None, "unix_path": None}
    listeners = [
        Target(name="abstract unix socket of the host", kind="unix_abstract", address="", port=None),
        Target(name="unix socket of the host at a path", kind="unix_path", address="", port=None),
    ]
    for address in addresses.HOST_ADDRESSES:
        listeners += [
            Target(name=f"{kind} to the host at {address}", kind=kind, address=address, port=ports[kind])
            for kind in ("tcp", "udp")
        ]
        listeners.append(Target(name=f"ping of the host at {address}", kind="icmp", address=address, port=None))
    return attacks(
        Scene(
            listeners=tuple(listeners),
            neighbour=("",),
            proxies=("",),
            pool="",
            abstract="",
            set_uid=("",),
            host_file="",
        )
    )


def fight(installation: Installation) -> Round:
    """Adopt a policy on a bare installation, try the whole table, then the floods; stops the daemon at the end."""
    begin = time.monotonic()
    rig = installation.rig
    limits = {"output": "1MiB", "timeout": "5m"}
    installation.adopt(
        {
            "platform": documents.platform(),
            "agents/helper": installation.agent(allow=LISTED, limits=limits),
            "agents/neighbour": installation.agent("neighbour", allow=["api.vendor.com"], limits=limits),
            "agents/flooder": installation.agent("flooder", allow=["example.com"], limits=LIMITS),
        }
    )
    with Listeners(rig) as listening:
        script = Path(neighbour.__file__).read_text("utf-8")
        command = [documents.PYTHON, "-I", "neighbour.py", _ABSTRACT, str(PORT)]
        installation.drop("neighbour", documents.job(*command, agent="neighbour", input={"neighbour.py": script}))
        run = installation.live("neighbour")["run"]
        record = installation.runtime / "runs" / run / "output.log"
        installation.eventually(lambda: b"answer 200" in record.read_bytes(), "the neighbour works", timeout=20)
        table = attacks(_scene(installation, listening))
        # While it scans, another sandbox comes up, with a gate of its own: so the scan comes first.
        orders = sorted((attack.attempt() for attack in table), key=lambda order: order["do"] != "scan")
        listening.prove()
        rig.clear()
        installation.drop("helper", documents.attempts(*orders, ca=rig.ca.read_text("utf-8"), wait_s=_WAIT_S))
        installation.live("helper")
        installation.drop("newcomer", documents.job("/usr/bin/true", agent="neighbour"))
        result = installation.result("helper", timeout=110)
        newcomer = installation.result("newcomer")
        arrivals = _arrivals(installation, listening)
        asked = frozenset(rig.asked())
        listening.prove()
        floods, too_much = _flood(installation)
        answers = record.read_bytes().count(b"answer 200")
        answered = _answers_on(installation, record, answers)
        ended = installation.cancel("neighbour")
    said = installation.output("neighbour").decode().splitlines()
    installation.stop()
    return Round(
        table=table,
        lines=documents.lines(installation, "helper"),
        arrivals=arrivals,
        asked=asked,
        result=result,
        neighbour=ended,
        neighbour_said=tuple(said),
        neighbour_decisions=tuple((one["host"], one["verdict"]) for one in installation.decisions("neighbour")),
        newcomer=newcomer,
        floods=floods,
        too_much=too_much,
        answered_after_floods=answered,
        left=tuple(installation.traces()),
        seconds=time.monotonic() - begin,
    )


def _scene(installation: Installation, listening: Listeners) -> Scene:
    """Tell the attacker what there is to know: on an engine, what it says of the neighbour's containers."""
    engine = installation.on.engine
    if engine is None:
        # A neighbour has no address of its own here: where else could it be than on the host, or on loopback?
        near = ("127.0.0.2", "127.255.255.254")
        return Scene(
            listeners=listening.targets,
            neighbour=near,
            proxies=(addresses.HOST_V4, addresses.HOST_PRIVATE),
            pool="127.0.0.0/28",
            abstract=_ABSTRACT,
            set_uid=("/usr/bin/su",),
            host_file=str(installation.host_config),
        )
    found: dict[str, list[str]] = {}
    for row in engine.get("/containers/json"):
        networks = row["NetworkSettings"]["Networks"]
        # The fence before the way out, whose name comes earlier.
        listed = [networks[name]["IPAddress"] for name in sorted(networks, reverse=True)]
        found[row["Labels"]["ringfence.role"]] = listed
    return Scene(
        listeners=listening.targets,
        neighbour=tuple(found["agent"]),
        proxies=tuple(found["proxy"]),
        pool=_POOL,
        abstract=_ABSTRACT,
        set_uid=("/set-uid-sleep", "5"),
        host_file=str(installation.host_config),
    )


def _arrivals(installation: Installation, listening: Listeners) -> tuple[str, ...]:
    """Give what came to a listener of the host, and what crossed the link and no proxy had a reason to send."""
    packets = [
        f"{packet.kind} to {packet.address}:{packet.port}"
        for packet in installation.rig.packets()
        if (packet.kind, packet.address, packet.port) not in _ALLOWED_PACKETS
    ]
    asked = [f"a question for {query.name}" for query in installation.rig.queries() if query.name.endswith(TUNNEL)]
    evil = [f"{each.kind} for {each.sni}" for each in installation.rig.arrivals() if each.sni == "evil.com"]
    return (*packets, *asked, *evil, *(f"{arrival.kind} at {arrival.address}" for arrival in listening.arrivals()))


def _flood(installation: Installation) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Run the floods side by side; gives their results, and the bytes of each result beyond what it may take."""
    for flood in FLOODS:
        installation.drop(flood.stem, documents.script(flood.script, agent="flooder"))
    results = {flood.name: installation.result(flood.stem, timeout=90) for flood in FLOODS}
    kept = {
        flood.name: sum(path.stat().st_size for path in installation.done(flood.stem).iterdir()) for flood in FLOODS
    }
    return results, {name: size - KEPT for name, size in kept.items() if size > KEPT}


def _answers_on(installation: Installation, record: Path, before: int) -> bool:
    """Wait until the neighbour has got another answer."""
    installation.eventually(
        lambda: record.read_bytes().count(b"answer 200") > before, "the neighbour works on", timeout=10
    )
    return True
