"""Runs the proxy's benchmark, prints its page and, when it is a full one, writes it: `python -m tests.bench proxy`."""

from __future__ import annotations

import sys

from tests.bench.page import Part, put
from tests.bench.proxy import profile, report
from tests.bench.proxy.measures import FULL, QUICK, Bench
from tests.bench.proxy.scene import opened
from tests.proxy.harness import LOOPS
from tests.proxy.peers.peers import Peer, build


def main(*, quick: bool = False, only_profile: bool = False) -> int:
    """Measure and tell; status 1 when a target is not reached (a quick run tells and judges nothing)."""
    build()
    peers = [peer for peer in Peer if peer is not Peer.UVLOOP or "uvloop" in LOOPS]
    with opened() as scene:
        bench = Bench(scene, peers, QUICK if quick else FULL, _say)
        if only_profile:
            sys.stdout.writelines(f"{line}\n" for line in profile.section(scene, bench, peers))
            return 0
        samples = bench.run()
        text = report.page(samples, peers, report.COMMAND + (" --quick" if quick else ""))
        if not quick:
            text += "\n" + "\n".join([*profile.section(scene, bench, peers), ""])
    sys.stdout.write(text)
    if quick:
        return 0
    put(Part.PROXY, text)
    values = ((target, target.ratio(samples)) for target in report.targets())
    return int(any(value is not None and not target.reached(value) for target, value in values))


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")


if __name__ == "__main__":
    sys.exit(main(quick="--quick" in sys.argv[1:], only_profile="--profile" in sys.argv[1:]))
