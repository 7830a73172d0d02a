"""Owns what the benchmark says: medians, spreads, ratios, and the targets they are held against; measures nothing."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TYPE_CHECKING, Final

from tests.bench.proxy.measures import Figure, Samples, machine
from tests.proxy.peers.peers import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND: Final = "python -m tests.bench proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What ours must reach: a factor against a peer in the same run, or a bound."""

    figure: Figure
    ours: Peer
    bound: float
    against: Peer | None = None

    def ratio(self, samples: Samples) -> float | None:
        """Return how many times as good as the peer ours is, or the value; None when it was not measured."""
        own = samples.values.get(self.figure, {}).get(self.ours)
        if not own:
            return None
        if self.against is None:
            return median(own)
        theirs = samples.values.get(self.figure, {}).get(self.against)
        if not theirs:
            return None
        # of each round its own ratio: what slows the machine down for a while slows both
        pairs = list(zip(own, theirs, strict=False))
        return median(a / b if self.figure.more_is_better else b / a for a, b in pairs)

    def reached(self, value: float) -> bool:
        """Say whether that is good enough."""
        return value >= self.bound if self.against is not None else value <= self.bound

    def __str__(self) -> str:
        if self.against is None:
            return f"{self.figure}, {self.ours}: at most {self.bound:g}"
        return f"{self.figure}, {self.ours}: {self.bound:g} times as good as {self.against} or better"


def targets() -> Iterator[Target]:
    """List what is to be reached."""
    fast, plain, smoke = Peer.UVLOOP, Peer.ASYNCIO, Peer.SMOKESCREEN
    for figure in (Figure.CONNECT_CPU, Figure.CONNECT_RATE):
        yield Target(figure=figure, ours=fast, bound=2, against=smoke)
        yield Target(figure=figure, ours=fast, bound=1, against=Peer.TINYPROXY)
        yield Target(figure=figure, ours=plain, bound=1, against=smoke)
    for ours in (fast, plain):
        for figure in (Figure.DENY_CPU, Figure.DENY_RATE):
            yield Target(figure=figure, ours=ours, bound=1.5, against=smoke)
        yield Target(figure=Figure.CONNECT_P99, ours=ours, bound=1, against=smoke)
        for figure in (Figure.DOWN_CPU, Figure.DOWN_RATE):
            yield Target(figure=figure, ours=ours, bound=0.8, against=Peer.HAPROXY)
            yield Target(figure=figure, ours=ours, bound=1, against=smoke)
        yield Target(figure=Figure.IDLE, ours=ours, bound=10)
        yield Target(figure=Figure.BASE, ours=ours, bound=25)
        yield Target(figure=Figure.FIRST, ours=ours, bound=120)
        for figure in (Figure.STORM_RATIO, Figure.STALL_RATIO, Figure.STALLED):
            yield Target(figure=figure, ours=ours, bound=2)
        for figure in (Figure.STORM_MORE, Figure.FLOOD_MORE, Figure.SCARCE_MORE):
            yield Target(figure=figure, ours=ours, bound=8)
        for figure in (Figure.FLOOD_P99, Figure.SCARCE_P99):
            yield Target(figure=figure, ours=ours, bound=50)


_ABOUT: Final = (
    "Medians; in brackets the quartiles. CPU-seconds are the proxy's own, by the kernel's clock of its process. Of",
    "a CONNECT everything is on: list, own DNS, address checks, one decision line, and on port 443 the ClientHello,",
    "which only ours reads. HAProxy is the near-limit: it passes connections and bytes on to one fixed address,",
    "without CONNECT, list, DNS or log line. tinyproxy's bytes are a tenth of the others'. Rates depend on the",
    "machine's other work; ratios are of rounds side by side.",
)


def page(samples: Samples, peers: list[Peer], command: str) -> str:
    """Write the whole page."""
    repeats = max(len(found) for by_peer in samples.values.values() for found in by_peer.values())
    lines = [
        "# How fast the egress proxy is, beside others",
        "",
        f"Made by `{command}` (root) on {machine()}, Python {platform.python_version()}, {repeats} interleaved rounds.",
        *_ABOUT,
        "",
        "| | " + " | ".join(peers) + " |",
        "|---|" + "---|" * len(peers),
    ]
    for figure in Figure:
        by_peer = samples.values.get(figure, {})
        lines.append(f"| {figure} | " + " | ".join(_cell(by_peer.get(peer, [])) for peer in peers) + " |")
    lines.append("| CONNECTs that went wrong | " + " | ".join(str(samples.errors[peer]) for peer in peers) + " |")
    lines += ["", "## Held against what is to be reached", "", "| target | measured | |", "|---|---|---|"]
    for target in targets():
        value = target.ratio(samples)
        verdict = "not measured" if value is None else "reached" if target.reached(value) else "**not reached**"
        lines.append(f"| {target} | {'' if value is None else f'{value:.2f}'} | {verdict} |")
    return "\n".join([*lines, ""])


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    if len(values) < 3:
        return _short(median(values))
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{_short(median(values))} ({_short(low)}-{_short(high)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
