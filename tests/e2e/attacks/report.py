"""Owns docs/fence.md: the table of attacks and backends, as text. Runs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.e2e.attacks.arena import names
from tests.e2e.attacks.floods import FLOODS
from tests.e2e.attacks.table import Group, Open
from tests.e2e.grounds import CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.e2e.attacks.arena import Round
    from tests.e2e.attacks.control import Shown
    from tests.e2e.grounds import Ground

PAGE: Final = CHECKOUT / "docs" / "fence.md"
COMMAND: Final = "python -m tests.e2e.attacks --write"
_HEAD: Final = f"""# What holds: attacks on the fence

Made by `{COMMAND}`; do not edit. Each line is one attack, run as the workload of a job, with a live
neighbour beside it and a third sandbox being made meanwhile. A cell says what the attack came to for the workload.
Whatever it says, nothing arrived: listeners on every address of the host, raw sockets for ICMP, Unix sockets, the
neighbour, every server of an internet of our own and a sniffer on the only link to it were alive before and after, and
a table at the end counts what they saw.

*In the open* is the control: the same attack as root in a guest that is wired as an ordinary container is (a bridge, an
address, a default route), where it must come to something. `-`: there is nothing like it in the open.
"""


def page(shown: Mapping[str, Shown], rounds: Mapping[Ground, Round], versions: Mapping[Ground, str]) -> str:
    """Write the page.

    Args:
        shown: the control run, by attack.
        rounds: what was fought, by ground; the columns in their order.
        versions: what each ground consists of, in a line.
    """
    lines = [_HEAD]
    columns = ["in the open", *map(str, rounds)]
    rule = "|---" * (1 + len(columns)) + "|"
    for group in Group:
        lines += [f"\n## {group}\n", f"| attack | {' | '.join(columns)} |", rule]
        for attack in names():
            if attack.group is group:
                opened = "-" if attack.opens is Open.FENCED else _opened(shown[attack.name])
                cells = [opened, *(each.word(attack) for each in rounds.values())]
                lines.append(f"| {attack.name} | {' | '.join(map(_cell, cells))} |")
    columns = columns[1:]
    rule = "|---" * (1 + len(columns)) + "|"
    lines += ["\n## Floods\n", f"| a job that tries to use up | {' | '.join(columns)} |", rule]
    for flood in FLOODS:
        cells = [_end(each.floods[flood.name]) for each in rounds.values()]
        lines.append(f"| {flood.name} | {' | '.join(map(_cell, cells))} |")
    lines += ["\n## Arrivals\n", f"| | {' | '.join(columns)} |", rule]
    for what, counts in _counts(rounds).items():
        lines.append(f"| {what} | {' | '.join(map(str, counts))} |")
    lines += ["\n## What was attacked\n", *(f"- {ground}: {text}" for ground, text in versions.items())]
    return "\n".join(lines) + "\n"


def _opened(shown: Shown) -> str:
    return f"arrives: {shown.arrivals[0]}" if shown.arrivals else shown.outcome


def _end(result: Mapping[str, object]) -> str:
    return f"{result['code']} {result['status']}" if result["status"] is not None else str(result["code"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _counts(rounds: Mapping[Ground, Round]) -> dict[str, list[int]]:
    every = rounds.values()
    return {
        "attacks tried": [len(each.lines) for each in every],
        "attacks that came to something": [sum(len(each.defeats(group)) for group in Group) for each in every],
        "arrivals at listeners of the host, of the internet, and on the link": [len(each.arrivals) for each in every],
        "arrivals at the neighbour": [
            sum(line.startswith("arrival") for line in each.neighbour_said) for each in every
        ],
        "answers that the neighbour got meanwhile": [
            sum(line == "answer 200" for line in each.neighbour_said) for each in every
        ],
        "things left behind": [len(each.left) for each in every],
    }


def versions(one: Round) -> str:
    """Say what a ground consists of, by what its own result says."""
    found: Mapping[str, str] = one.result["backend"]["versions"]
    wanted = ("engine", "api", "bubblewrap", "kernel", "python")
    said = ", ".join(f"{name} {found[name]}" for name in wanted if name in found)
    inside = one.result["gate"]["runtime"].get("kernel") if one.result["gate"] else None
    return said + (f"; inside: {' '.join(inside.split()[:3])}" if inside else "")
