"""Measures what a fence costs: job dropped to the command's first instruction, beside a bare container or bare bwrap.

Each round runs the bare command, the same through a backend, and the same through a whole daemon, one after the other,
so that all three meet the same machine. The command says the time by itself, as its first and only instruction. What a
bare container's creation and start cost through the same API is measured in the same round: two starts, the proxy's and
the agent's, cannot happen at the same time, so they and what must wait in between are below what no fence gets.

    python -m tests.bench run [--quick]
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from reconciler.backends.bubblewrap import Bubblewrap
from reconciler.backends.docker_engine import Engine
from reconciler.core.choose import Missing
from reconciler.host import DockerSettings
from tests.backends.docker_world import GVISOR, DockerOnRig
from tests.backends.world import Recorder, built, host, inside, launch
from tests.bench.page import Part, put
from tests.e2e import documents
from tests.e2e.grounds import BUBBLEWRAP, Ground, Place, Places
from tests.e2e.installation import Installation
from tests.rig import Rig
from tests.rig.docker import Runtime, agent_image_tar, cache, proxy_image_tar
from tests.rig.docker.fixtures import Images, Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reconciler.backends.base import Backend

CLOCK = ("date", "+%s.%N")
MOST = 2.5
"""How many times a bare container a job may take to its first instruction."""
ROUNDS, QUICK = 9, 2
HEAD = """## What a fence costs a job

Made by `python -m tests.bench run` (root), the machine's load {load:.1f} at its end, {rounds} interleaved rounds;
medians. *Bare* is `docker run` of the same image on the same runtime, from the command line to the command's first
instruction (for bubblewrap a bare `bwrap`), *behind a fence* the same through a backend alone, *ratio* that of a job,
from the moment it is dropped, to the bare one of its own round.

"""
_PARTS = {
    "address ranges": "guard, image and free ranges looked up",
    "networks": "two networks (containers are created beside them)",
    "proxy started": "start of the proxy's container (the gate's beside it)",
    "proxy ready": "start of Python in it, until it listens",
    "listener handed out": "bwrap and proxy up, listener handed out",
    "gate": "gate asked and heard to its end",
    "agent inspected": "everything inspected, the gate removed",
    "first": "start of the command, to its first instruction",
}
"""Steps on the way to the first instruction, none beside another."""


class Clocked(Recorder):
    """An observer that remembers when each step was done."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[str, float]] = []

    def step(self, name: str) -> None:
        """Remember."""
        self.times.append((name, time.time()))


@dataclass(slots=True)
class Measured:
    """One ground's rounds, in seconds."""

    bare: list[float] = field(default_factory=list)
    creation: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    backend: list[float] = field(default_factory=list)
    daemon: list[float] = field(default_factory=list)
    teardown: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


def bare(place: Place) -> float:
    """Run the command as anybody would; seconds to its first instruction."""
    began = time.time()
    if place.engine is None:
        # The same host system, without any of what a fence adds.
        visible = "--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64"
        apart = (
            "--proc /proc --dev /dev --unshare-all --die-with-parent --new-session --clearenv --setenv PATH /usr/bin"
        )
        command = [str(shutil.which("bwrap")), *visible.split(), *apart.split(), *CLOCK]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    else:
        image = place.image.partition("@")[2] or place.image
        runtime = str(place.ground.runtime)
        done = place.engine.docker("run", "--rm", "--pull", "never", "--runtime", runtime, image, *CLOCK, check=True)
    return float(done.stdout) - began


def bare_parts(place: Place, into: Measured) -> None:
    """Create and start the command's container through the API, without a fence; nothing where there is no engine."""
    if place.engine is None:
        return
    name = f"bench-{os.urandom(4).hex()}"
    config = {
        "Image": place.image.partition("@")[2] or place.image,
        "Cmd": list(CLOCK),
        "HostConfig": {"Runtime": str(place.ground.runtime)},
    }

    async def main() -> None:
        with contextlib.closing(Engine(str(place.settings["docker"]["socket"]))) as engine:  # type: ignore[index]  # as grounds made it
            engine.speak(await engine.versions())
            began = time.monotonic()
            await engine.create_container(name, config)
            created = time.monotonic()
            await engine.start(name)
            into.start.append(time.monotonic() - created)
            into.creation.append(created - began)
            await engine.remove_container(name)

    anyio.run(main)


def through_backend(backend: Backend, into: Measured) -> None:
    """Run the command behind a fence, without a daemon; note its parts."""
    recorder = Clocked()

    async def main() -> float:
        began = time.time()
        async with backend.launch(launch(*CLOCK), recorder) as sandbox:
            live = built(sandbox)
            await live.start()
            await live.wait()
            first = float(recorder.stdout)
            into.backend.append(first - began)
            recorder.times.append(("first", first))
            done = time.time()
        into.teardown.append(time.time() - done)
        return began

    before = anyio.run(main)
    for name, when in sorted((row for row in recorder.times if row[0] in _PARTS), key=lambda row: row[1]):
        into.parts.setdefault(name, []).append(when - before)
        before = when


def through_daemon(installation: Installation, number: int, into: Measured) -> None:
    """Drop a job; how long until its first instruction."""
    stem = f"bench-{number}"
    began = time.time()
    installation.drop(stem, documents.job(*CLOCK))
    result = installation.result(stem)
    if result["code"] != "exited":
        raise SystemExit(f"{installation.on.ground}: {result}")
    into.daemon.append(float(installation.output(stem)) - began)
    installation.settled(result["run"])


@contextlib.contextmanager
def standing(place: Place) -> Iterator[tuple[Backend, Installation]]:
    """Give a backend and a daemon on one ground, both probed."""
    runtime = Path(tempfile.mkdtemp(prefix="rf-", dir="/tmp"))
    runtime.chmod(0o755)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(inside(Path("/run/netns", place.rig.host)))
            backend: Backend
            if place.engine is None:
                backend = Bubblewrap(host(runtime), "bench")
            else:
                os.environ.update(place.engine._environment())
                named: dict[str, object] = dict(place.settings["docker"])  # type: ignore[call-overload]  # as grounds made it
                settings = DockerSettings(
                    socket=place.engine.socket,
                    proxy_image=str(named["proxy_image"]),
                    gvisor_runtime=GVISOR if place.gvisor else None,
                )
                backend = DockerOnRig(
                    dataclasses.replace(host(runtime), docker=settings), "bench", place.engine, place.image
                )
            found = anyio.run(backend.probe)
            if isinstance(found, Missing):
                raise SystemExit(f"{place.ground}: {found.code}: {found.message}")
            installation = stack.enter_context(Installation(place))
            installation.adopt(
                {
                    "platform": documents.platform(),
                    "agents/helper": installation.agent(),
                    "egress/org": documents.egress(),
                }
            )
            yield backend, installation
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def measure(place: Place, rounds: int) -> Measured:
    """Measure one ground; the first round warms and is dropped."""
    into = Measured()
    with standing(place) as (backend, installation):
        for number in range(rounds + 1):
            into.bare.append(bare(place))
            bare_parts(place, into)
            through_backend(backend, into)
            through_daemon(installation, number, into)
    for rows in (into.bare, into.creation, into.start, into.backend, into.daemon, into.teardown, *into.parts.values()):
        del rows[:1]
    return into


def table(measured: dict[str, Measured]) -> str:
    """Write the tables: medians, ratios of rounds side by side, and the parts."""
    lines = [
        "| | bare | behind a fence | job dropped to first instruction | ratio | teardown |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in measured.items():
        seen = [middle(each.bare), middle(each.backend), middle(each.daemon), f"**{ratio(each):.2f}**"]
        lines.append(f"| {name} | {' | '.join(seen)} | {middle(each.teardown)} |")
    for name, each in measured.items():
        lines += ["", f"{name}, medians of the parts, one after the other:", ""]
        lines += [f"- {_PARTS[part]}: {middle(each.parts[part])}" for part in _PARTS if part in each.parts]
        over = [dropped - built for dropped, built in zip(each.daemon, each.backend, strict=True)]
        lines.append(f"- beside these, the daemon's own (job found, claimed, written down): {middle(over)}")
        lines += floor(each)
    return "\n".join([*lines, ""])


def floor(each: Measured) -> list[str]:
    """Say what no fence of two containers one after the other gets below, with what a bare one costs."""
    if not each.start:
        return []
    once = statistics.median(each.start)
    python = statistics.median(each.parts["proxy ready"])
    least = 2 * once + python
    bound = statistics.median((2 * start + python) / alone for start, alone in zip(each.start, each.bare, strict=True))
    least_said = f"{least * 1000:.0f} ms: {bound:.2f} times bare"
    return [
        f"- a bare container through the same API: created {middle(each.creation)}, started {middle(each.start)}",
        f"- so the least with a proxy before the agent, two starts and Python's own, is {least_said}",
    ]


def middle(rows: list[float]) -> str:
    """Give the median of seconds in milliseconds."""
    return f"{statistics.median(rows) * 1000:.0f} ms"


def ratio(each: Measured) -> float:
    """Give the median ratio of rounds side by side."""
    return statistics.median(dropped / alone for dropped, alone in zip(each.daemon, each.bare, strict=True))


def main(*, quick: bool = False) -> int:
    """Measure every ground that this machine has; 1 when a job takes more than `MOST` times a bare one."""
    grounds = [BUBBLEWRAP]
    if cache.built():
        grounds += [Ground(Setup(), runtime) for runtime in Runtime]
    measured: dict[str, Measured] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        images: Callable[[], Images] = lambda: Images(  # noqa: E731 - made when an engine is wanted
            agent=agent_image_tar(folder / "agent.tar"), proxy=proxy_image_tar(folder / "proxy.tar")
        )
        places = stack.enter_context(contextlib.closing(Places(lambda: stack.enter_context(Rig()), images)))
        for ground in grounds:
            measured[str(ground)] = measure(places.stand(ground), QUICK if quick else ROUNDS)
    text = table(measured)
    print(text)  # noqa: T201 - what a benchmark is for
    if not quick:
        put(Part.RUN, HEAD.format(load=os.getloadavg()[0], rounds=ROUNDS) + text)
    # A bare bwrap is six milliseconds, which no proxy of Python's starts in: its row is for the absolute numbers.
    missed = {name: ratio(each) for name, each in measured.items() if name != str(BUBBLEWRAP) and ratio(each) > MOST}
    for name, value in missed.items():
        print(f"{name}: {value:.2f} times a bare one; {MOST} is the target")  # noqa: T201 - as above
    return int(bool(missed) and not quick)


if __name__ == "__main__":
    sys.exit(main())
