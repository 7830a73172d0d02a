"""Owns the figures of the policy side: 10,000 agents read, judged and planned, then one changed, and the memory of it.

Everything is real: files, signatures by ssh-keygen, audit rows, the state file. Times are seconds of one processor, for
nothing here waits for anything but ssh-keygen, so they are what a quiet machine takes and do not depend on its load.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from reconciler.config_pass import snapshot_of, trust_of
from reconciler.core.plan import plan
from reconciler.evaluate import evaluate
from reconciler.reason import Verifier
from reconciler.state import State
from tests.estate import Estate

AGENTS = 10_000
TEAMS = 20
_GRANTS_EACH = 400
"""Grants of one statement: a statement is at most 64 KiB."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was measured, and the most that it may be."""

    name: str
    value: float
    bound: float
    unit: str

    def __str__(self) -> str:
        verdict = "ok" if self.value <= self.bound else "TOO MUCH"
        return f"{self.name:44} {self.value:8.2f} {self.unit:3} (at most {self.bound:g})  {verdict}"


def document(number: int, *, pids: int = 128) -> str:
    """Write one agent's document as people do."""
    return f"""\
version: 1
kind: agent
name: agent-{number}
description: syncs what team {number % TEAMS} has bought
image: registry.example/agent-{number % 50}@sha256:{number % 50:064x}
minimum_isolation: container
allow:
  - api-{number}.vendor.com
  - "*.team-{number % TEAMS}.example.com"
  - files.pypi.org:443
deny: [old.team-{number % TEAMS}.example.com]
submitters: [svc-{number % TEAMS}]
limits: {{cpus: 1, memory: 256MiB, pids: {pids}, timeout: 5m}}
"""


def build(root: Path) -> None:
    """Make an estate: its policy, all of it signed, and its trust files."""
    estate = Estate(root, settings="max_files: 20000\n")
    estate.journal.close()
    policy = root / "policy"
    (policy / "egress").mkdir()
    (policy / "platform.yaml").write_text("version: 1\nkind: platform\nenabled: true\n")
    allow = ["*.vendor.com", "*.example.com", "*.example.com:5432", "*.pypi.org"]
    documents = {"org": ["*"], **{f"team-{n}": [f"agent-{i}" for i in range(n, AGENTS, TEAMS)] for n in range(TEAMS)}}
    grants: list[dict[str, object]] = [{"document": "platform", "field": "/enabled", "value": True}]
    for name, agents in documents.items():
        text = {"version": 1, "kind": "egress", "name": name, "agents": agents, "allow": allow}
        (policy / "egress" / f"{name}.yaml").write_text(json.dumps(text))
        grants += [{"document": f"egress/{name}", "field": "/allow", "add": entry} for entry in allow]
    for number in range(AGENTS):
        (policy / "agents" / f"agent-{number}.yaml").write_text(document(number))
        name = f"agents/agent-{number}"
        for entry in (f"api-{number}.vendor.com", f"*.team-{number % TEAMS}.example.com", "files.pypi.org:443"):
            grants.append({"document": name, "field": "/allow", "add": entry})
        grants.append({"document": name, "field": "/submitters", "add": f"svc-{number % TEAMS}"})
    for number, first in enumerate(range(0, len(grants), _GRANTS_EACH), start=1):
        estate.reason(number, *grants[first : first + _GRANTS_EACH])


def plan_everything(root: Path) -> None:
    """Read, judge and plan the whole estate against the floor; print seconds and peak memory as JSON."""
    estate = Estate.at(root)
    begun = time.process_time()
    snapshot, trust = snapshot_of(estate.host), trust_of(estate.host)
    found = evaluate(
        snapshot, trust, State(), now=estate.clock.now(), host=estate.host, verifier=Verifier(budget=math.inf)
    )
    told = plan(found.outcome, found.desired, revision=found.in_force.revision)
    lines = sum(1 for _ in told.lines())
    seconds = time.process_time() - begun
    if found.problems or found.outcome.held or found.outcome.unused or lines < AGENTS:
        raise AssertionError(f"{found.problems[:3]} {found.outcome.held[:3]} {lines}")
    _say(seconds=seconds)


def follow(root: Path) -> None:
    """Run passes as the daemon does: the first, one with nothing new, one with one changed document, one restarted."""
    estate, changing = Estate.at(root), root / "policy" / "agents" / "agent-7.yaml"
    changing.write_text(document(7))
    passes = {"first": _timed(estate), "same": _timed(estate)}
    changing.write_text(document(7, pids=64))
    time.sleep(0.1)
    passes["changed"] = _timed(estate)
    if estate.config.last is None or len(estate.config.last.outcome.changes) != 1:
        raise AssertionError("the changed document is not the one change")
    estate.restart()
    passes["restarted"] = _timed(estate)
    _say(**passes)


def _timed(estate: Estate) -> float:
    begun = time.process_time()
    while estate.run().admissions.waiting:
        pass  # a pass looks at so many signatures and no more
    return time.process_time() - begun


def _say(**seconds: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(json.dumps({"peak": peak, **seconds}) + "\n")


def measured(step: str, root: Path) -> dict[str, float]:
    """Take one step in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.policy", step, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=600)
    value: dict[str, float] = json.loads(done.stdout)
    return value


def figures() -> list[Figure]:
    """Measure everything."""
    with tempfile.TemporaryDirectory(prefix="ringfence-bench-") as directory:
        root = Path(directory)
        build(root)
        whole, passes = measured("plan", root), measured("follow", root)
    return [
        Figure("10,000 agents: load, validate, judge, plan", whole["seconds"], 10, "s"),
        Figure("    peak memory", whole["peak"], 300, "MB"),
        Figure("the daemon's first pass, with rows and state", passes["first"], 20, "s"),
        Figure("a pass with nothing new", passes["same"], 2, "s"),
        Figure("a pass with one changed document", passes["changed"], 2, "s"),
        Figure("the first pass after a restart", passes["restarted"], 20, "s"),
        Figure("    peak memory of the daemon's passes", passes["peak"], 300, "MB"),
    ]


def main() -> int:
    """Print each figure beside its bound; 1 when one is beyond it."""
    found = figures()
    for figure in found:
        sys.stdout.write(f"{figure}\n")
    return int(any(figure.value > figure.bound for figure in found))


if __name__ == "__main__":
    {"plan": plan_everything, "follow": follow, "build": build}[sys.argv[1]](Path(sys.argv[2]))
