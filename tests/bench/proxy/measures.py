"""Owns the measurements: what is measured of each proxy, interleaved, and the samples; prints nothing."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from tests.bench.proxy.scene import cores
from tests.proxy.peers.peers import ADDRESS, Peer, Running, program

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.proxy.scene import Scene

CLIENTS: Final = 32
HOST: Final = "example.com"
MANY: Final = "n%d.example.com"
DENIED: Final = "n%d.evil.com"
GIGABYTE: Final = 10**9
CAP: Final = 512
DESCRIPTORS: Final = 256
FLOOD: Final = 2000
_FIRST_PORT: Final = 1100
"""Below what the kernel gives to clients."""
_DENIALS: Final = {Peer.SMOKESCREEN: 407}
"""Statuses of a refusal by policy, where it is not 403."""


class Figure(StrEnum):
    """One thing that is measured; the value is its name, unit included."""

    CONNECT_CPU = "CPU-seconds per 1,000 CONNECTs"
    CONNECT_CPU_LONG = "CPU-seconds per 1,000 CONNECTs, list of 1,000"
    LOOKUP_CPU = "CPU-seconds per 1,000 CONNECTs, each a new name"
    DENY_CPU = "CPU-seconds per 1,000 denials"
    DOWN_CPU = "CPU-seconds per GB down"
    UP_CPU = "CPU-seconds per GB up"
    CONNECT_RATE = "CONNECTs a second"
    CONNECT_RATE_LONG = "CONNECTs a second, list of 1,000"
    LOOKUP_RATE = "CONNECTs a second, each a new name"
    DENY_RATE = "denials a second"
    DOWN_RATE = "GB/s down one tunnel"
    UP_RATE = "GB/s up one tunnel"
    CONNECT_P99 = "p99 of a CONNECT at 32 clients, ms"
    QUIET_P99 = "p99 of a calm client, ms"
    STORM_P99 = "p99 of a calm client beside 500 slow heads and 20 hung names, ms"
    STORM_RATIO = "the latter over the former"
    STORM_MORE = "MB more beside 500 slow heads and 20 hung names"
    STALL_P99 = "p99 of a calm client beside a stalled reader of 10 GB, ms"
    STALL_RATIO = "that over the p99 of a calm client"
    STALLED = "MB more beside a stalled reader of 10 GB"
    FLOOD_P99 = "p99 of a byte through a tunnel and back while 2,000 clients push at the cap, ms"
    FLOOD_MORE = "MB more while 2,000 clients push at the cap"
    SCARCE_P99 = "p99 of a byte through a tunnel and back while they push and descriptors end, ms"
    SCARCE_MORE = "MB more while they push and descriptors end"
    IDLE = "KB for an idle tunnel"
    BASE = "MB resident before the first tunnel"
    FIRST = "ms from exec to the first decision"

    @property
    def more_is_better(self) -> bool:
        """Say which way is good."""
        return " a second" in self.value or "GB/s" in self.value


@dataclass(frozen=True, slots=True)
class Effort:
    """How long and how often."""

    repeats: int
    seconds: float
    bytes: int
    tunnels: int


FULL: Final = Effort(repeats=7, seconds=0.8, bytes=GIGABYTE, tunnels=500)
QUICK: Final = Effort(repeats=3, seconds=0.3, bytes=GIGABYTE // 4, tunnels=200)


@dataclass(slots=True)
class Samples:
    """All samples, by figure and proxy, in the order of the rounds; and how many CONNECTs went wrong."""

    values: dict[Figure, dict[Peer, list[float]]] = field(default_factory=dict)
    errors: Counter[Peer] = field(default_factory=Counter)

    def add(self, figure: Figure, peer: Peer, value: float) -> None:
        """Keep one sample."""
        self.values.setdefault(figure, {}).setdefault(peer, []).append(value)


def entries(count: int) -> list[str]:
    """Make an allow list of this many entries, the wanted ones last."""
    return [*(f"host{at}.filler{at % 7}.net" for at in range(count - 2)), "example.com", "*.example.com"]


class Bench:
    """One run over these proxies."""

    def __init__(self, scene: Scene, peers: list[Peer], effort: Effort, say: Callable[[str], None]) -> None:
        self.samples = Samples()
        self._scene = scene
        self._peers = peers
        self._effort = effort
        self._say = say
        self._ports = _FIRST_PORT

    def run(self) -> Samples:
        """Measure everything."""
        with ExitStack() as stack:
            short = [stack.enter_context(self.start(peer, 10)) for peer in self._peers]
            long = [stack.enter_context(self.start(peer, 1000)) for peer in self._peers if peer is not Peer.HAPROXY]
            for number in range(self._effort.repeats):
                self._say(f"round {number + 1} of {self._effort.repeats}")
                # another order each time, so that no proxy always follows the same one
                turn = number % len(short)
                for running in short[turn:] + short[:turn]:
                    self._round(running)
                for running in long[turn:] + long[:turn]:
                    self._connects(running, HOST, 200, Figure.CONNECT_CPU_LONG, Figure.CONNECT_RATE_LONG)
        for number in range(max(self._effort.repeats // 2, 1)):
            self._say(f"memory and storms, {number + 1}")
            for peer in self._peers:
                if peer is not Peer.HAPROXY:
                    self._alone(peer)
        return self.samples

    def start(self, peer: Peer, size: int, *, before: tuple[str, ...] = (), cap: int = 4096) -> Running:
        """Start a proxy with a list of this size, behind these words, and let it serve once."""
        self._ports += 1
        place = self._scene.place(f"{peer.name}-{self._ports}")
        made = program(peer, place, self._ports, allow=entries(size), cap=cap)
        at = len(place.enter)
        made = replace(made, argv=(*made.argv[:at], *before, *made.argv[at:]))
        running = Running(peer, place, self._ports, made)
        if peer is Peer.HAPROXY:
            time.sleep(0.3)
        else:
            # the first request is nobody's sample
            end = time.monotonic() + 10
            while not self._scene.measure("connect", running.port, HOST, 1, 0.1, 200, 0)["done"]:
                if time.monotonic() > end:
                    raise RuntimeError(f"{peer} does not serve: {running.log.read_text(errors='replace')[-500:]}")
        return running

    def _round(self, running: Running) -> None:
        if running.peer is Peer.HAPROXY:
            # connections only: the near-limit of what two of them cost
            p99 = self._connects(running, HOST, 0, Figure.CONNECT_CPU, Figure.CONNECT_RATE)
            self.samples.add(Figure.CONNECT_P99, running.peer, p99)
        else:
            p99 = self._connects(running, HOST, 200, Figure.CONNECT_CPU, Figure.CONNECT_RATE)
            self.samples.add(Figure.CONNECT_P99, running.peer, p99)
            self._connects(running, MANY, 200, Figure.LOOKUP_CPU, Figure.LOOKUP_RATE)
            self._connects(running, DENIED, _DENIALS.get(running.peer, 403), Figure.DENY_CPU, Figure.DENY_RATE)
        self._bytes(running, "fetch", Figure.DOWN_CPU, Figure.DOWN_RATE)
        self._bytes(running, "push", Figure.UP_CPU, Figure.UP_RATE)

    def _connects(self, running: Running, host: str, status: int, cpu: Figure, rate: Figure) -> float:
        before = running.cpu_s()
        found = self._scene.measure("connect", running.port, host, CLIENTS, self._effort.seconds, status, 0)
        used = running.cpu_s() - before
        done = max(int(found["done"]), 1)
        self.samples.errors[running.peer] += int(found["errors"])
        self.samples.add(cpu, running.peer, 1000 * used / done)
        self.samples.add(rate, running.peer, found["done"] / found["seconds"])
        return float(found["p99_us"]) / 1000

    def _bytes(self, running: Running, way: str, cpu: Figure, rate: Figure) -> None:
        # a tenth for the slowest, which would take half of the time of all
        size = self._effort.bytes // (10 if running.peer is Peer.TINYPROXY else 1)
        before = running.cpu_s()
        found = self._scene.measure(way, running.port, HOST, size, int(running.peer is Peer.HAPROXY))
        self.samples.add(cpu, running.peer, (running.cpu_s() - before) * GIGABYTE / size)
        self.samples.add(rate, running.peer, size / found["seconds"] / GIGABYTE)

    def _alone(self, peer: Peer) -> None:
        """Measure what needs a process of its own: its start, its memory, a storm."""
        add, scene = self.samples.add, self._scene
        add(Figure.FIRST, peer, self._first(peer))
        with self.start(peer, 10) as running:
            base = running.resident()
            add(Figure.BASE, peer, base / 1e6)
            with scene.beside("hold", running.port, HOST, 50):
                warm = running.resident()
                with scene.beside("hold", running.port, HOST, self._effort.tunnels):
                    add(Figure.IDLE, peer, (running.resident() - warm) / self._effort.tunnels / 1000)
        with self.start(peer, 10) as running:
            quiet = self._calm(running)
            base = running.resident()
            # asked for and never read: what is read would only make room for more of the same
            with scene.beside("stall", running.port, HOST, 10 * GIGABYTE):
                stalled = self._calm(running)
                add(Figure.STALLED, peer, (running.resident() - base) / 1e6)
            with scene.beside("slow", running.port, HOST, 500, 20):
                storm = self._calm(running)
                add(Figure.STORM_MORE, peer, (running.resident() - base) / 1e6)
        add(Figure.QUIET_P99, peer, quiet)
        add(Figure.STORM_P99, peer, storm)
        add(Figure.STALL_P99, peer, stalled)
        add(Figure.STALL_RATIO, peer, stalled / quiet if quiet else float("inf"))
        add(Figure.STORM_RATIO, peer, storm / quiet if quiet else float("inf"))
        if peer.ours:
            # the others have no such cap, and what they do without descriptors is theirs
            self._flood(peer, (), Figure.FLOOD_P99, Figure.FLOOD_MORE)
            self._flood(peer, ("/usr/bin/prlimit", f"--nofile={DESCRIPTORS}"), Figure.SCARCE_P99, Figure.SCARCE_MORE)

    def _flood(self, peer: Peer, before: tuple[str, ...], p99: Figure, more: Figure) -> None:
        with self.start(peer, 10, before=before, cap=CAP) as running:
            seconds = max(3 * self._effort.seconds, 1.5)
            with self._scene.tunnels(running.port, HOST, 4, seconds, 10_000) as measure:
                base = running.resident()
                with self._scene.beside("slow", running.port, HOST, FLOOD, 0):
                    found = measure()
                    self.samples.add(more, peer, (running.resident() - base) / 1e6)
        self.samples.errors[peer] += int(found["errors"])
        self.samples.add(p99, peer, float(found["p99_us"]) / 1000)

    def _calm(self, running: Running) -> float:
        """Ask a hundred times a second in all."""
        found = self._scene.measure("connect", running.port, HOST, 4, max(3 * self._effort.seconds, 1.5), 200, 40_000)
        self.samples.errors[running.peer] += int(found["errors"])
        return float(found["p99_us"]) / 1000

    def _first(self, peer: Peer) -> float:
        self._ports += 1
        place = self._scene.place(f"{peer.name}-{self._ports}")
        made = program(peer, place, self._ports, allow=entries(10))
        feed = place.directory / "feed"
        feed.write_bytes(made.feed)
        # the load is in the namespace already, and starts the proxy on the proxy's core
        own = made.argv[len(place.enter) :]
        found = self._scene.measure("first", self._ports, DENIED, feed if made.feed else "", *own)
        return float(found["ms"])


def machine() -> str:
    """Say what it ran on."""
    with open("/proc/cpuinfo") as lines:  # noqa: PTH123 — not a path of ours
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    proxy, load = cores()
    return f"{model}, proxy on core {proxy}, load on core {load}; {ADDRESS} for clients, one veth to the origin"
