"""Measures what a fence costs in a cluster: a run through the backend beside a bare pod of the same image and runtime.

Each round runs a bare pod and a run, one after the other, so that both meet the same machine. The command says the time
by itself, as its first and only instruction. How long the gate watches whether denials stay is told apart: that second
is bought, not spent.

    python -m tests.bench k8s [--quick]
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from reconciler.backends import k8s_gate
from reconciler.core.choose import Missing
from reconciler.host import K8sSettings
from tests.backends import k8s_world
from tests.backends.world import built, host, inside, launch
from tests.bench.run import CLOCK, Clocked, middle
from tests.rig import Rig
from tests.rig.docker import agent_image_tar, proxy_image_tar
from tests.rig.k8s import Cluster, Netpol, cache
from tests.rig.k8s.objects import pod

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.backends.k8s_world import K8sOnRig

MOST: Final = 2.0
"""How many times a bare pod a run may take, the gate's watching not counted."""
ROUNDS, QUICK = 7, 2
WATCHED_S: Final = (k8s_gate._ROUNDS - 1) * k8s_gate._INTERVAL_S
"""How long a gate watches, at least."""
_PARTS: Final = {
    "proxy ready": "objects made, proxy's pod up",
    "gate": "agent's pod up, gate settled, watched, heard",
    "fence read back": "everything read back",
    "first": "the command's own start",
    "end": "its end seen",
}


@dataclass(slots=True)
class Measured:
    """One cluster's and runtime's rounds, in seconds."""

    bare_first: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    run: list[float] = field(default_factory=list)
    settled: list[float] = field(default_factory=list)
    teardown: list[float] = field(default_factory=list)
    calls: list[Counter[str]] = field(default_factory=list)
    """Of each run, how often which verb was used on what."""
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """The median ratio of rounds side by side, from the order to the end seen, without the gate's watching."""
        return statistics.median((run - WATCHED_S) / bare for run, bare in zip(self.run, self.bare, strict=True))


def bare(cluster: Cluster, image: str, runtime: str | None, into: Measured) -> None:
    """Run the command in a pod as anybody would."""
    pods = "/api/v1/namespaces/default/pods"
    began = time.time()
    cluster.call("POST", pods, pod("bare", image, CLOCK, runtime=runtime))
    while cluster.get(f"{pods}/bare")["status"]["phase"] != "Succeeded":
        time.sleep(0.02)
    into.bare.append(time.time() - began)
    into.bare_first.append(float(cluster.get(f"{pods}/bare/log")) - began)
    cluster.call("DELETE", f"{pods}/bare?gracePeriodSeconds=0")


def fenced(backend: K8sOnRig, into: Measured) -> None:
    """Run the command behind a fence; note its parts, and what the API server was asked."""
    recorder = Clocked()
    asked = _asked(backend.cluster)

    async def main() -> float:
        began = time.time()
        async with backend.launch(launch(*CLOCK), recorder) as sandbox:
            live = built(sandbox)
            into.settled.append(float(str(live.report.runtime.get("settled_ms", 0))) / 1000)
            await live.start()
            await live.wait()
            done = time.time()
            await live.drain()
            first = float(recorder.stdout)
            recorder.times += [("first", first), ("end", done)]
            into.first.append(first - began)
            into.run.append(done - began)
        into.teardown.append(time.time() - done)
        return began

    before = anyio.run(main)
    into.calls.append(_asked(backend.cluster) - asked)
    for name, when in sorted((row for row in recorder.times if row[0] in _PARTS), key=lambda row: row[1]):
        into.parts.setdefault(name, []).append(when - before)
        before = when


def _asked(cluster: Cluster) -> Counter[str]:
    return Counter(f"{each.verb} {each.resource}" for each in cluster.requests() if "python" in each.agent)


@contextlib.contextmanager
def standing(netpol: Netpol, *, gvisor: bool) -> Iterator[tuple[K8sOnRig, str]]:
    """Give a probed backend on a cluster of its own, and the agent's image."""
    runtime = Path(tempfile.mkdtemp(prefix="rf-", dir="/tmp"))
    runtime.chmod(0o755)
    try:
        with contextlib.ExitStack() as stack:
            rig = stack.enter_context(Rig())
            cluster = stack.enter_context(Cluster(rig, netpol=netpol))
            agent = cluster.load(agent_image_tar(runtime / "agent.tar"))
            k8s = K8sSettings(
                kubeconfig=cluster.kubeconfig,
                namespace=k8s_world.NAMESPACE,
                proxy_image=cluster.load(proxy_image_tar(runtime / "proxy.tar")),
                runtime_class="gvisor" if gvisor else None,
            )
            k8s_world.prepare(cluster)
            os.environ.update(cluster.environment)
            stack.enter_context(inside(Path("/run/netns", rig.host)))
            backend = k8s_world.K8sOnRig(dataclasses.replace(host(runtime), k8s=k8s), "bench", cluster, agent)
            found = anyio.run(backend.probe)
            if isinstance(found, Missing):
                raise SystemExit(f"{netpol}: {found.code}: {found.message}")
            yield backend, agent
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def measure(netpol: Netpol, rounds: int, *, gvisor: bool) -> Measured:
    """Measure one enforcer and runtime; the first round warms and is dropped."""
    into = Measured()
    with standing(netpol, gvisor=gvisor) as (backend, agent):
        for number in range(rounds + 1):
            if number == 1:
                into = Measured()
            bare(backend.cluster, agent, "gvisor" if gvisor else None, into)
            fenced(backend, into)
    return into


def table(measured: dict[str, Measured]) -> str:
    """Write the tables: medians, ratios of rounds side by side, and the parts."""
    heads = ["", "bare pod: first instruction", "end", "run: first instruction", "end", "of it the gate watches"]
    heads += ["ratio without", "teardown", "API calls"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, each in measured.items():
        times = [middle(rows) for rows in (each.bare_first, each.bare, each.first, each.run)]
        calls = f"{statistics.median(run.total() for run in each.calls):.0f}"
        rest = [f"{WATCHED_S:g} s", f"**{each.ratio:.2f}**", middle(each.teardown), calls]
        lines.append(f"| {name} | {' | '.join([*times, *rest])} |")
    for name, each in measured.items():
        lines += ["", f"{name}, milliseconds until each part was done (the gate settled after {middle(each.settled)}):"]
        lines += [f"- {_PARTS[part]}: {middle(each.parts[part])}" for part in _PARTS if part in each.parts]
        asked = sum(each.calls, Counter[str]()).most_common()
        lines.append(
            f"- asked of the API server: {', '.join(f'{n / len(each.calls):.1f} {what}' for what, n in asked)}"
        )
    return "\n".join(lines)


def main(*, quick: bool = False) -> int:
    """Measure both enforcers and both runtimes; 1 when a run takes more than `MOST` times a bare pod."""
    if not cache.built():
        print("the Kubernetes rig is not built: `python -m tests.rig.k8s build`")  # noqa: T201 - what a benchmark is for
        return 0
    measured = {
        f"{netpol}, {'gvisor' if gvisor else 'runc'}": measure(netpol, QUICK if quick else ROUNDS, gvisor=gvisor)
        for netpol in (Netpol.KUBE_ROUTER, Netpol.KNP)
        for gvisor in (False, True)
    }
    print(table(measured))  # noqa: T201 - as above
    missed = {name: each.ratio for name, each in measured.items() if each.ratio > MOST}
    for name, value in missed.items():
        print(f"{name}: {value:.2f} times a bare pod; {MOST} is the target")  # noqa: T201 - as above
    return int(bool(missed) and not quick)


if __name__ == "__main__":
    sys.exit(main(quick="--quick" in sys.argv))
