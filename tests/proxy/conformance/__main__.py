"""Owns the comparison: every case through ours and the peers, a column each, printed and written to the docs.

`python -m tests.proxy.conformance [--quick]` builds what is missing, needs root, and takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TextIO

from tests.proxy import examples
from tests.proxy.conformance.run import Seen, judge, prepared, scripted, send
from tests.proxy.conformance.table import ALLOW, Case, load
from tests.proxy.conformance.test_conformance import changes
from tests.proxy.harness import LOOPS, Proxy
from tests.proxy.peers.peers import Peer, Place, Running, build, program
from tests.rig import Rig
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE: Final = ROOT / "docs" / "conformance.md"
COMMAND: Final = "python -m tests.proxy.conformance"
PEERS: Final = (Peer.SMOKESCREEN, Peer.SQUID, Peer.TINYPROXY)
PORT: Final = 3300
_READY_S: Final = 10.0
FORGETS_S: Final = 1.2

Columns = dict[str, dict[str, list[str] | None]]
"""By proxy and case: what was wrong, or None where the case asks for something that the proxy has no setting for."""


def ours(rig: Rig, loop: str, cases: list[Case]) -> dict[str, list[str] | None]:
    """Run every case through ours."""
    found: dict[str, list[str] | None] = {}
    with Proxy(rig, examples.policy(allow=ALLOW), arguments=["--loop", loop]) as proxy:
        for case in cases:
            proxy.replace(**changes(case.row))
            found[case.id] = _one(rig, proxy.port, case, strict=True)
    return found


def peers(rig: Rig, peer: Peer, cases: list[Case]) -> dict[str, list[str] | None]:
    """Run every case through a peer; one that keeps answers gets the time to forget them before a name changes."""
    found: dict[str, list[str] | None] = {}
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


def table(cases: list[Case], columns: Columns) -> Iterator[str]:
    """Write the page's tables, a line at a time."""
    names = list(columns)
    yield "| | cases | " + " | ".join(names) + " |"
    yield "|---|---|" + "---|" * len(names)
    for title, chosen in (
        ("refused as they must be", [case for case in cases if not case.accept]),
        ("served as they must be", [case for case in cases if case.accept]),
        ("all", cases),
    ):
        yield f"| {title} | {len(chosen)} | " + " | ".join(_sum(columns[name], chosen) for name in names) + " |"
    rules: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        rules[case.rule].append(case)
    for rule, chosen in rules.items():
        yield ""
        yield f"### {rule[0].upper()}{rule[1:]}"
        yield ""
        yield "| case | must be | " + " | ".join(names) + " |"
        yield "|---|---|" + "---|" * len(names)
        for case in chosen:
            cells = (_cell(columns[name][case.id]) for name in names)
            yield f"| {_plain(case.id)} | {'served' if case.accept else 'refused'} | " + " | ".join(cells) + " |"


def _sum(column: dict[str, list[str] | None], chosen: list[Case]) -> str:
    results = [column[case.id] for case in chosen]
    asked = [result for result in results if result is not None]
    return f"{sum(not result for result in asked)} of {len(asked)}"


def _cell(result: list[str] | None) -> str:
    if result is None:
        return "no such setting"
    return f"**{_plain('; '.join(result))}**" if result else "ok"


def _plain(text: str) -> str:
    shown = "".join(
        one if one.isprintable() and one.isascii() and one not in "|*<>`" else f"\\x{ord(one):02x}" for one in text
    )
    return shown if len(shown) <= 100 else shown[:100] + "..."


_ABOUT: Final = (
    "Every case goes over raw sockets through a real process in namespaces without an uplink, with a listener alive",
    "at every address that must not be reached. For ours, *ok* means the very status, and that nothing went further",
    "than the rule lets it: no question to the resolver, no connection, no byte. For the others it means only that",
    "a case that must be refused was refused somehow and in time, with no question, connection or byte beyond it,",
    "and that one that must be served was.",
    "",
    "Each is set up as its documentation tells a careful operator, with the same allow list: smokescreen (v0.1.0)",
    "by an enforcing ACL and its own address checks, Squid (5.7) by `dstdomain`, ports and `dst` for ranges that",
    "are not public, tinyproxy (1.11) by its filter and `ConnectPort`. Where one fails a case it may be by design:",
    "none of them promises what ringfence does, smokescreen knows no ports in its list, tinyproxy no addresses.",
)


def page(cases: list[Case], columns: Columns) -> str:
    """Write the whole page."""
    made = f"Made by `{COMMAND}` (root; Python {platform.python_version()})."
    title = "# What the egress proxy does with each case, beside others"
    return "\n".join([title, "", made, *_ABOUT, "", *table(cases, columns), ""])


def _column(run: Callable[[Rig], dict[str, list[str] | None]]) -> dict[str, list[str] | None]:
    with Rig() as rig, scripted(rig):
        return run(rig)


def main(out: TextIO = sys.stdout) -> int:
    """Run it; status 1 when ours fails a case."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out what waits for deadlines; write no page")
    quick = parser.parse_args().quick
    build()
    cases = [case for case in load() if not (quick and case.slow)]
    # they wait more than they work, so all run side by side, each in namespaces of its own
    with ThreadPoolExecutor() as pool:
        waiting = {f"ours ({loop})": pool.submit(_column, partial(ours, loop=loop, cases=cases)) for loop in LOOPS}
        waiting |= {str(peer): pool.submit(_column, partial(peers, peer=peer, cases=cases)) for peer in PEERS}
        columns: Columns = {name: one.result() for name, one in waiting.items()}
    text = page(cases, columns)
    with contextlib.suppress(BrokenPipeError):
        out.write(text)
    if not quick:
        PAGE.write_text(text)
    failed = [name for name in columns if name.startswith("ours") and any(columns[name].values())]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
