"""Owns the comparison: every case through ours and the peers, a column each, printed and written to the docs.

`python -m tests.proxy.conformance [--quick]` builds what is missing, needs root, and takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TextIO

from tests.proxy.conformance.columns import Column, ours, peers
from tests.proxy.conformance.table import Case, load
from tests.proxy.peers.peers import Peer, build
from tests.proxy.pythons import found
from tests.rig.docker import cache
from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = ROOT / "docs" / "conformance.md"
COMMAND: Final = "python -m tests.proxy.conformance"
PEERS: Final = (Peer.SMOKESCREEN, Peer.SQUID, Peer.TINYPROXY)
OURS: Final = "ours"


def table(cases: list[Case], columns: dict[str, Column]) -> Iterator[str]:
    """Write the page's tables, a line at a time: ours one by one in the sums, and as one beside the others below."""
    yield "| | refused as they must be | served as they must be | all |"
    yield "|---|---|---|---|"
    refused, served = ([case for case in cases if case.accept is accept] for accept in (False, True))
    for name, column in columns.items():
        yield f"| {name} | {_sum(column, refused)} | {_sum(column, served)} | {_sum(column, cases)} |"
    merged = _merged(columns)
    names = list(merged)
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
            cells = (_cell(merged[name][case.id]) for name in names)
            yield f"| {_plain(case.id)} | {'served' if case.accept else 'refused'} | " + " | ".join(cells) + " |"


def _merged(columns: dict[str, Column]) -> dict[str, Column]:
    """Put ours into one column, where each says what is wrong with it."""
    mine = {name: column for name, column in columns.items() if name.startswith(OURS)}
    one: Column = {}
    for name, column in mine.items():
        for case, wrong in column.items():
            one[case] = (one.get(case) or []) + [f"{name}: {what}" for what in wrong or ()]
    return {OURS: one, **{name: column for name, column in columns.items() if name not in mine}}


def _sum(column: Column, chosen: list[Case]) -> str:
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


def page(cases: list[Case], columns: dict[str, Column]) -> str:
    """Write the whole page."""
    made = f"Made by `{COMMAND}` (root), ours by every Python that the machine has."
    title = "# What the egress proxy does with each case, beside others"
    return "\n".join([title, "", made, *_ABOUT, "", *table(cases, columns), ""])


def main(out: TextIO = sys.stdout) -> int:
    """Run it; status 1 when ours fails a case."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out what waits for deadlines; write no page")
    quick = parser.parse_args().quick
    pythons = found()
    build()
    for part in filter(None, (python.uvloop for python in pythons)):
        # none for a Python that uvloop is not made for yet
        with contextlib.suppress(subprocess.CalledProcessError):
            cache.build(part)
    cases = [case for case in load() if not (quick and case.slow)]
    # they wait more than they work, so all run side by side, each in namespaces of its own
    with ThreadPoolExecutor(len(pythons) * 2 + len(PEERS)) as pool:
        waiting = {
            f"{OURS} ({loop}, Python {python.version})": pool.submit(ours, python, loop, cases)
            for python in pythons
            for loop in python.loops
        }
        waiting |= {str(peer): pool.submit(peers, peer, cases) for peer in PEERS}
        columns = {name: one.result() for name, one in waiting.items()}
    text = page(cases, columns)
    with contextlib.suppress(BrokenPipeError):
        out.write(text)
    if not quick:
        PAGE.write_text(text)
    failed = [name for name in columns if name.startswith(OURS) and any(columns[name].values())]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
