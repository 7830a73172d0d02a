"""Owns the figures of hostile files: the worst that one committed file of 256 KiB costs a pass, by kind.

Each file is judged whole, as a pass does: read, checked, and where it is valid put in force on the floor; and then once
more unchanged. Times are seconds of one processor. Unit tests count the work; here it is only timed.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from reconciler.core.memory import Memory
from reconciler.core.reconcile import reconcile
from reconciler.core.request import read
from reconciler.core.validate import desired
from tests.bench.policy import Figure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SIZE = 256 * 1024
MOST = 1.0
"""Seconds that one file may hold a pass."""
NODES = 19_900
"""As many nodes as a document may have, but for its head."""
_IMAGE = f"registry.example/helper@sha256:{0:064x}"
_AGENT = f"version: 1\nkind: agent\nname: helper\nimage: {_IMAGE}\nminimum_isolation: container\n"
_EGRESS = "version: 1\nkind: egress\nname: org\n"
_PLATFORM = b"version: 1\nkind: platform\nenabled: true\n"


def filled(head: str, line: str, most: int = NODES, size: int = SIZE) -> bytes:
    """Give a head and then a line, `{}` in it its number, again and again until the file is full or has `most`."""
    parts, left = [head], size - len(head.encode())
    for number in range(most):
        made = line.replace("{}", str(number)) + "\n"
        left -= len(made.encode())
        if left < 0:
            break
        parts.append(made)
    return "".join(parts).encode()


def agents() -> Mapping[str, bytes]:
    """Give documents of an agent, by what is in them without end."""
    allow, deep = _AGENT + "allow:\n", "".join(f"{'  ' * depth}a:\n" for depth in range(17))
    return {
        "control characters": b"a: " + b"\x01" * (SIZE - 4) + b"\n",
        "a tab on each line": b"\t\n" * (SIZE // 2),
        "bytes that are no UTF-8": b"\xff" * SIZE,
        "directives": filled("", "%TAG !a{}! a", most=SIZE) + b"---\na: 1\n",
        "nodes": filled(allow, "- a", most=SIZE),
        "anchors": filled(allow, "- &a b"),
        "words that are booleans in YAML 1.1": filled(allow, "- no"),
        "duplicate keys": filled(_AGENT, "allow: a", most=NODES // 2),
        "maps in maps": filled(_AGENT + deep, f"{'  ' * 17}a: b"),
        "brackets": b"a: " + b"[" * (SIZE - 4),
        "nodes below one long key": f'{_AGENT}? "{"k" * 190_000}"\n: [{", ".join(["1"] * NODES)}]\n'.encode(),
        "nodes below keys of 500 characters": filled(f"{_AGENT}? {'k' * 500}\n:\n", "- 1"),
        "long keys": filled("", f'? "{"k" * 1000}{{}}"\n: 1'),
        "entries without a dot": filled(allow, "- a{}"),
        "entries that are numbers": filled(allow, "- 1"),
        "entries that are maps": filled(allow, "- a: {}", most=NODES // 3),
        "entries that are not ASCII": filled(allow, '- "ä{}.example.com"'),
        "A-labels": filled(allow, "- xn--a{}.com"),
        "wildcards on public suffixes": filled(allow, '- "*.co.uk"'),
        "one entry of 250 KiB": f"{allow}- {'a.' * 125_000}\n".encode(),
        "one wildcard of 250 KiB": f"{allow}- {'*.' * 125_000}\n".encode(),
        "unknown fields": filled(_AGENT, "alow{}: 1", most=NODES // 2),
        "long unknown fields": filled(_AGENT, f"{'al' * 60}{{}}: 1"),
        "unknown limits": filled(_AGENT + "limits:\n", "  pid{}: 1", most=NODES // 2),
        "variables that steer": filled(_AGENT + "env:\n  allow:\n", "  - LD_{}"),
        "secrets without a file": filled(_AGENT + "secrets:\n", "  k{}: a", most=NODES // 2),
        "submitters that are no users": filled(_AGENT + "submitters:\n", "- A{}"),
        "entries in allow and in deny": _both(),
        "wildcards below each other": filled(allow, '- "*.{}.example.com"'),
        "private suffixes": filled(allow, '- "*.github.io:{}"'),
        "an image of 250 KiB": _AGENT.replace(_IMAGE, "a-" * 125_000).encode(),
        "an image of separators": _AGENT.replace(_IMAGE, f"a{'-' * 250_000}/").encode(),
        "an image of slashes": _AGENT.replace(_IMAGE, "a/" * 125_000).encode(),
    }


def _both() -> bytes:
    first = filled(f"{_AGENT}allow:\n", "- h{}.a.io", most=NODES // 2, size=SIZE // 2)
    return first + filled("deny:\n", "- h{}.b.io", most=NODES // 2, size=SIZE // 2)


def layers() -> Mapping[str, bytes]:
    """Give egress documents over an agent that itself has as many entries as fit."""
    everybody = f'{_EGRESS}agents: ["*"]\n'
    return {
        "wildcards over an agent's entries": filled(f"{everybody}allow:\n", '- "*.h{}.io"'),
        "one wildcard over an agent's entries": f'{everybody}allow: ["*.example.com"]\n'.encode(),
        "ranges that cannot be fused": filled(f"{everybody}deny_ranges:\n", "- 2001:db8:{}::/128", most=9_999),
        "agents in its scope": filled(f"{_EGRESS}agents:\n", "- a{}"),
    }


def jobs() -> Mapping[str, bytes]:
    """Give job files: whoever may submit one may submit these."""
    head = "version: 1\nkind: job\nagent: helper\ncommand: [a]\n"
    return {
        "arguments": filled(head.replace("command: [a]\n", "command:\n"), "- a"),
        "variables": filled(f"{head}env:\n", "  a{}: b", most=NODES // 2),
        "variables that are numbers": filled(f"{head}env:\n", "  a{}: 1", most=NODES // 2),
        "input files": filled(f"{head}input:\n", "  a{}: b", most=NODES // 2),
        "unknown fields": filled(head, "a{}: b", most=NODES // 2),
    }


def figures() -> Iterable[Figure]:
    """Judge each file alone."""
    for name, data in agents().items():
        yield from _judged(f"agent: {name}", {"agents/helper.yaml": data[:SIZE]})
    agent = filled(f"{_AGENT}allow:\n", "- x.h{}.io")
    for name, data in layers().items():
        yield from _judged(f"egress: {name}", {"agents/helper.yaml": agent, "egress/org.yaml": data}, most=3 * MOST)
    for name, data in jobs().items():
        begun = time.process_time()
        read(data)
        yield Figure(f"job: {name}", time.process_time() - begun, MOST, "s")
    bad = filled(f"{_AGENT}allow:\n", "- no", size=12_000)
    yield from _judged("1,000 bad files of 12 KB", {f"agents/a{n}.yaml": bad for n in range(1000)}, most=20)


def _judged(name: str, files: Mapping[str, bytes], most: float = MOST) -> Iterable[Figure]:
    times = [time.process_time()]
    wanted, outcome = None, None
    for _ in range(2):
        wanted = desired({"platform.yaml": _PLATFORM, **files}, previous=wanted)
        memory = Memory() if outcome is None else outcome.memory
        outcome = reconcile(wanted, memory, (), now=0.0, previous=outcome)
        times.append(time.process_time())
    yield Figure(name, times[1] - times[0], most, "s")
    yield Figure("    unchanged in the next pass", times[2] - times[1], MOST, "s")


def main() -> int:
    """Print each figure beside its bound; 1 when one is beyond it."""
    beyond = 0
    for figure in figures():
        sys.stdout.write(f"{figure}\n")
        beyond |= figure.value > figure.bound
    return beyond
