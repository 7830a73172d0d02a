"""Owns the measurement of what a container reaches on each kind of Docker network; judges nothing, fences nothing.

The container is an agent as ringfence runs it: no capability, uid 1000, read-only. What it reaches was seen from both
ends: by an answer, or at a listener of the host that is proven alive before and after.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from tests.e2e.listeners import Listeners
from tests.rig import addresses, network
from tests.rig.docker import images
from tests.rig.docker.engine import Runtime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.rig.docker.engine import Engine

_DRIVER: Final = "com.docker.network.bridge"
_PEER_PORT: Final = 8000
_TIMEOUT_S: Final = 0.7
_DATAGRAM: Final = """
import socket, sys, time
sending = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
    sending.sendto(sys.argv[3].encode(), (sys.argv[1], int(sys.argv[2])))
    time.sleep(0.5)  # it waits for an answer by ARP
except OSError as refused:
    print(refused, file=sys.stderr)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One kind of network: what `docker network create` is told."""

    name: str
    label: str
    six: bool = False
    options: tuple[str, ...] = ()


ORDINARY: Final = Network(name="ordinary", label="ordinary")
INTERNAL: Final = Network(name="internal", label="--internal", options=("--internal",))
INHIBITED: Final = Network(
    name="inhibited",
    label="inhibit_ipv4, internal",
    options=("--internal", "--opt", f"{_DRIVER}.inhibit_ipv4=true"),
)
ISOLATED: Final = Network(
    name="isolated",
    label="isolated v4",
    options=("--internal", "--opt", f"{_DRIVER}.gateway_mode_ipv4=isolated"),
)
ISOLATED_WITH_SIX: Final = Network(
    name="isolated4",
    label="isolated v4, with --ipv6",
    six=True,
    options=ISOLATED.options,
)
ISOLATED_BOTH: Final = Network(
    name="isolated46",
    label="isolated v4 and v6, with --ipv6",
    six=True,
    options=(*ISOLATED.options, "--opt", f"{_DRIVER}.gateway_mode_ipv6=isolated"),
)
NETWORKS: Final = (ORDINARY, INTERNAL, INHIBITED, ISOLATED, ISOLATED_WITH_SIX, ISOLATED_BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one container reached on one network. Words in a set say by which address or way."""

    bridge: frozenset[str]
    """What addresses the host has on the bridge: v4, v6, ll."""
    link: frozenset[str]
    """By which of the host's addresses on the link it answered TCP: v4, v6, ll."""
    elsewhere: bool
    """Whether the host answered at an address that is not on the link."""
    ping: bool
    """Whether an echo request to where the host would be on the link arrived there."""
    outside: frozenset[str]
    """Who answered beyond the host: internet, metadata, neighbour (a container on the ordinary network)."""
    lookups: int
    """How many queries for a name that the container asked for left the host."""
    bound: frozenset[str]
    """Bound to eth0, by SO_BINDTODEVICE: tcp when the host answered, udp when a datagram arrived at it."""


def measure(engine: Engine, image: str = images.AGENT) -> dict[tuple[Runtime, Network], Reach]:
    """Make every kind of network, run an agent on each under each runtime, four at once, and remove all of it.

    The engine has the agent's image. Raises RuntimeError when a listener or a container was not alive.
    """
    try:
        for number, each in enumerate(NETWORKS):
            _create(engine, number, each, image)
        with Listeners(engine.rig) as listeners:
            engine.rig.clear()
            world = _World(engine=engine, image=image, ports=_ports(listeners), neighbour=_neighbour(engine))
            pairs = [(runtime, each) for each in NETWORKS for runtime in Runtime]
            with ThreadPoolExecutor(4) as pool:
                lines = list(pool.map(lambda pair: world.tries(*pair), pairs))
            arrivals = frozenset((arrival.kind, arrival.peer) for arrival in listeners.arrivals())
            listeners.prove()
            return {pair: world.reach(*pair, each, arrivals) for pair, each in zip(pairs, lines, strict=True)}
    finally:
        for each in NETWORKS:
            engine.docker("rm", "--force", _peer(each))
            engine.docker("network", "rm", each.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """What the containers of one measurement have in common. `ports`: of the host's listeners, by kind."""

    engine: Engine
    image: str
    ports: Mapping[str, int]
    neighbour: str

    def tries(self, runtime: Runtime, on: Network) -> dict[str, str]:
        """Run one container; return the outcome of each attempt."""
        host = addresses.HOST_V4
        attempts: list[dict[str, object]] = [
            {"attempt": f"link {family}", "do": "tcp", "address": address, "port": self.ports["tcp"]}
            for family, address in self.on_bridge(on, told=True).items()
        ]
        attempts += [
            {"attempt": "elsewhere", "do": "tcp", "address": host, "port": self.ports["tcp"]},
            {"attempt": "internet", "do": "tcp", "address": addresses.EXAMPLE[0], "port": 80},
            {"attempt": "metadata", "do": "tcp", "address": addresses.METADATA, "port": 80},
            {"attempt": "neighbour", "do": "tcp", "address": self.neighbour, "port": _PEER_PORT},
            {"attempt": "ping", "do": "icmp", "address": self.on_bridge(on, told=True)["v4"]},
            {"attempt": "lookup", "do": "resolve", "name": _name(runtime, on)},
            {"attempt": "bound", "do": "bind_to_device", "address": host, "port": self.ports["tcp"], "device": "eth0"},
        ]
        # Last: until its own link-local address is proven unique the container has none to ask from.
        attempts += [
            {"attempt": "link ll", "do": "link_local", "address": address, "port": self.ports["tcp"]}
            for family, address in self.on_bridge(on).items()
            if family == "ll"
        ]
        script = 'python3 -c "$1" "$2" "$3" "$4"; exec python3 /workload.py "$5"'
        job = json.dumps({"attempts": attempts, "timeout": _TIMEOUT_S})
        sandbox = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "1000:1000", "--read-only"]
        sandbox += ["--dns-option", "timeout:1", "--dns-option", "attempts:1"]
        done = self.engine.docker(
            *(
                "run",
                "--rm",
                "--runtime",
                runtime,
                "--network",
                on.name,
                "--ip",
                _own(runtime, on),
                *sandbox,
                self.image,
            ),
            *("sh", "-c", script, "sh", _DATAGRAM, host, str(self.ports["udp"]), "from eth0", job),
            timeout_s=90,
        )
        outcomes = {line["attempt"]: line["outcome"] for line in map(json.loads, done.stdout.splitlines())}
        if len(outcomes) != len(attempts) or "broken" in outcomes.values():
            raise RuntimeError(
                f"the container on {on.name} under {runtime} did not try all: {done.stdout}{done.stderr}"
            )
        return outcomes

    def reach(
        self, runtime: Runtime, on: Network, outcomes: Mapping[str, str], arrivals: frozenset[tuple[str, str]]
    ) -> Reach:
        """Put together what the container saw and what the host and the internet saw."""
        reached = {name for name, outcome in outcomes.items() if outcome == "reached"}
        own = _own(runtime, on)
        bound = {"tcp"} if "bound" in reached else set()
        return Reach(
            bridge=frozenset(self.on_bridge(on)),
            link=frozenset(name.removeprefix("link ") for name in reached if name.startswith("link ")),
            elsewhere="elsewhere" in reached,
            ping=("icmp", own) in arrivals,
            outside=frozenset(reached & {"internet", "metadata", "neighbour"}),
            lookups=len(self.engine.rig.queries(_name(runtime, on))),
            bound=frozenset(bound | ({"udp"} if ("udp", own) in arrivals else set())),
        )

    def on_bridge(self, on: Network, *, told: bool = False) -> dict[str, str]:
        """Return the addresses of the host on the bridge by family (v4, v6, ll), as they are or as one would guess."""
        number = NETWORKS.index(on)
        if told:
            return {"v4": _gateway(number, 4)} | ({"v6": _gateway(number, 6)} if on.six else {})
        argv = [network.program("ip"), "-json", "address", "show", "dev", _bridge(number)]
        (link,) = json.loads(self.engine.rig.run(argv).stdout)
        families = {("inet", "global"): "v4", ("inet6", "global"): "v6", ("inet6", "link"): "ll"}
        return {families[each["family"], each["scope"]]: each["local"] for each in link["addr_info"]}


def _name(runtime: Runtime, on: Network) -> str:
    """Return the name that one container looks up, and no other."""
    return f"{on.name}.{runtime}.example.com"


def _own(runtime: Runtime, on: Network) -> str:
    """Return the address of one container, by which the host knows it; not .1, which the host would have."""
    return f"10.78.{NETWORKS.index(on)}.{10 + list(Runtime).index(runtime)}"


def _bridge(number: int) -> str:
    return f"br-kind{number}"


def _gateway(number: int, version: int) -> str:
    return f"10.78.{number}.1" if version == 4 else f"fd78:{number}::1"


def _peer(each: Network) -> str:
    return f"peer-{each.name}"


def _create(engine: Engine, number: int, each: Network, image: str) -> None:
    """Create a network and one container that listens on it, without which the bridge would have no carrier."""
    six = ["--ipv6", "--subnet", f"fd78:{number}::/64"] if each.six else []
    options = [*each.options, "--opt", f"{_DRIVER}.name={_bridge(number)}"]
    engine.docker("network", "create", "--subnet", f"10.78.{number}.0/24", *six, *options, each.name, check=True)
    serve = ("python3", "-m", "http.server", str(_PEER_PORT))
    engine.docker("run", "--detach", "--name", _peer(each), "--network", each.name, image, *serve, check=True)


def _neighbour(engine: Engine) -> str:
    """Return the address of the container that listens on the ordinary network."""
    (attached,) = engine.get(f"/containers/{_peer(ORDINARY)}/json")["NetworkSettings"]["Networks"].values()
    return str(attached["IPAddress"])


def _ports(listeners: Listeners) -> dict[str, int]:
    return {target.kind: target.port for target in listeners.targets if target.port is not None}


def table(result: Mapping[tuple[Runtime, Network], Reach]) -> str:
    """Return the measurement as Markdown: a column for each network; runc / runsc where they differ."""
    lines = ["| from the container | " + " | ".join(each.label for each in NETWORKS) + " |", "|---" * 7 + "|"]
    for field in fields(Reach):
        cells = []
        for each in NETWORKS:
            said = [_said(getattr(result[runtime, each], field.name)) for runtime in Runtime]
            cells.append(said[0] if len(set(said)) == 1 else f"runc {said[0]}; runsc {said[1]}")
        lines.append(f"| {_ROWS[field.name]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_ROWS: Final = {
    "bridge": "addresses of the host on the bridge",
    "link": "the host answers, by its address on the link",
    "elsewhere": "the host answers, by another address",
    "ping": "an echo request reaches the host, on the link",
    "outside": "reached beyond the host",
    "lookups": "DNS queries for one lookup that left the host",
    "bound": "reached the host, bound to eth0",
}


def _said(value: frozenset[str] | bool | int) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return str(value)
        case _:
            return ", ".join(sorted(value)) or "nothing"
