"""Owns where the time of a CONNECT goes: kernel or not, system calls, our functions; judges none of it."""

from __future__ import annotations

import os
import pstats
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from tests.bench.proxy.measures import CLIENTS, HOST, Bench, entries
from tests.proxy.peers.peers import Peer, Running, program
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.proxy.scene import Scene

COMMAND: Final = "python -m tests.bench proxy"
PEERS: Final[tuple[Peer, ...]] = (Peer.ASYNCIO, Peer.UVLOOP, Peer.SMOKESCREEN, Peer.HAPROXY)
SECONDS: Final = 2.0
TOP: Final = 12
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PROFILED: Final = (
    "import cProfile, sys, time; from proxy.main import main; out = sys.argv.pop(1); "
    "profile = cProfile.Profile(time.process_time); profile.runcall(main); profile.dump_stats(out)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """CPU-seconds for 1,000 CONNECTs, outside the kernel and in it, and system calls for one, by name."""

    user: float
    kernel: float
    calls: dict[str, float]


def section(scene: Scene, bench: Bench, peers: list[Peer]) -> Iterator[str]:
    """Measure, and write the section a line at a time."""
    spent: dict[Peer, Spent] = {peer: _spent(scene, bench, peer) for peer in PEERS if peer in peers}
    names = sorted({name for one in spent.values() for name in one.calls}, key=lambda name: -_most(spent, name))
    yield "## Where the time of a CONNECT goes"
    yield ""
    yield f"By `{COMMAND} --profile`: CPU-seconds per 1,000 CONNECTs by the kernel's clock, and system calls for one,"
    yield "counted by strace in a run of its own. HAProxy's is one connection passed on, without CONNECT."
    yield ""
    yield "| | " + " | ".join(spent) + " |"
    yield "|---|" + "---|" * len(spent)
    yield "| outside the kernel | " + " | ".join(f"{one.user:.3f}" for one in spent.values()) + " |"
    yield "| in the kernel | " + " | ".join(f"{one.kernel:.3f}" for one in spent.values()) + " |"
    yield "| system calls | " + " | ".join(f"{sum(one.calls.values()):.1f}" for one in spent.values()) + " |"
    for name in names:
        if _most(spent, name) >= 0.05:
            yield f"| {name} | " + " | ".join(f"{one.calls.get(name, 0):.2f}" for one in spent.values()) + " |"
    yield ""
    yield f"Our functions by their own time, the first {TOP} of a run under cProfile, which makes each call dearer; the"
    yield "shares are of all that was run, the start too:"
    yield ""
    yield "| function | share | calls for one CONNECT |"
    yield "|---|---|---|"
    yield from _functions(scene)


def _most(spent: dict[Peer, Spent], name: str) -> float:
    return max(one.calls.get(name, 0.0) for one in spent.values())


def _spent(scene: Scene, bench: Bench, peer: Peer) -> Spent:
    status = 0 if peer is Peer.HAPROXY else 200
    with bench.start(peer, 10) as running:
        before = _clocks(running)
        done = scene.measure("connect", running.port, HOST, CLIENTS, SECONDS, status, 0)["done"]
        user, kernel = (1000 * (b - a) / _TICKS / done for a, b in zip(before, _clocks(running), strict=True))
        return Spent(user=user, kernel=kernel, calls=_calls(scene, running, status))


def _clocks(running: Running) -> tuple[int, int]:
    fields = Path(f"/proc/{running.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]), int(fields[12])


def _calls(scene: Scene, running: Running, status: int) -> dict[str, float]:
    strace = shutil.which("strace")
    if strace is None:
        return {}
    out = scene.instance.directory / "calls"
    argv = [strace, "-f", "-c", "-o", str(out), "-p", str(running.process.pid)]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as tracing:
        time.sleep(0.5)
        done = scene.measure("connect", running.port, HOST, CLIENTS, SECONDS, status, 0)["done"]
        tracing.send_signal(2)
    rows = (line.split() for line in out.read_text().splitlines())
    return {row[-1]: int(row[3]) / done for row in rows if len(row) > 4 and row[3].isdigit() and row[-1] != "total"}


def _functions(scene: Scene) -> Iterator[str]:
    place = scene.place("profiled")
    out = place.directory / "profile"
    made = program(Peer.ASYNCIO, place, 1090, allow=entries(10))
    at = next(at for at, word in enumerate(made.argv) if word.endswith("ringfence-proxy"))
    made = replace(made, argv=(*made.argv[:at], sys.executable, "-c", _PROFILED, str(out), *made.argv[at + 1 :]))
    with Running(Peer.ASYNCIO, place, 1090, made) as running:
        end = time.monotonic() + 10
        while not scene.measure("connect", running.port, HOST, 1, 0.1, 200, 0)["done"]:
            if time.monotonic() > end:
                raise RuntimeError("the profiled proxy does not serve")
        done = scene.measure("connect", running.port, HOST, CLIENTS, SECONDS, 200, 0)["done"]
    rows = cast("dict[tuple[str, int, str], tuple[int, int, float, float, Any]]", vars(pstats.Stats(str(out)))["stats"])
    whole = sum(row[2] for row in rows.values())
    for (file, line, name), (_, count, own, _, _) in sorted(rows.items(), key=lambda row: -row[1][2])[:TOP]:
        where = name.strip("<>{}") if file == "~" else f"{_short(file)}:{line} {name}"
        yield f"| {where} | {100 * own / whole:.1f} % | {count / done:.1f} |"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
