"""Owns the gate of a Docker fence: the agent's twin from our own image, what it is asked, and what it says.

Does not build the fence and does not look at it from outside.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import anyio

from reconciler.backends import docker_objects, docker_proof, docker_spec, gate_targets, input_files
from reconciler.backends.base import Stream
from reconciler.backends.docker_place import Role
from reconciler.backends.docker_process import attached, how_it_ended, until_ended
from reconciler.backends.nft import PROXY_PORT
from reconciler.core.gate_report import GateReport, Target, TargetKind, judge

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup

    from reconciler.backends.base import Launch
    from reconciler.backends.canary import Canaries
    from reconciler.backends.docker_engine import Engine
    from reconciler.backends.docker_place import Where
    from reconciler.backends.docker_spec import Plain
    from reconciler.backends.gate_targets import Question
    from reconciler.backends.steps import Steps

_GATE_S = 30.0
_BUDGET_S = 10.0
_ROUNDS = 2
_INTERVAL_S = 0.02
_NEAR_S = 0.02
"""The least that silence lasts where only this host could answer; the gate's control lengthens it (decision 0018)."""
_MOST_REPORT = 1 << 20
_KEPT_DIAGNOSTICS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A gate's report, judged, and what else was found wrong with the gate itself, a line each."""

    report: GateReport
    structure: tuple[str, ...]
    diagnostics: str


@dataclass(frozen=True, slots=True)
class Unheard:
    """A gate that was asked nothing: it is not what it must be (a line for each thing), or nobody had a question."""

    structure: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a gate is asked, and the listeners at which nothing may arrive."""

    question: Question
    canaries: Canaries


async def run(
    engine: Engine,
    where: Where,
    spec: Plain,
    launch: Launch,
    *,
    standing: Callable[[], Awaitable[bool]],
    when: Callable[[], Awaitable[Asked | None]],
    steps: Steps,
    tasks: TaskGroup,
) -> Heard | Unheard:
    """Create the twin with the job's volume, write the job's files through it, start it, ask it, hear it to its end.

    The caller removes both, whatever comes of it.

    Args:
        engine: where.
        where: the run's place.
        spec: the twin's specification.
        launch: the run.
        standing: awaited before it starts: whether its network is there and looked at.
        when: awaited while it starts: what it is asked, None when there is nothing to ask about.
        steps: told what was done.
        tasks: what runs beside everything else.

    Raises:
        EngineError: the engine does not do as it is told.
    """
    name = where.name(Role.GATE)
    said = _Said()
    state, asked = None, None
    structure: list[str] = []
    await engine.create_volume(where.name(Role.JOB), where.labels(Role.JOB))
    await docker_objects.create(engine, name, spec)
    await engine.put(name, docker_spec.WORKING_DIRECTORY, input_files.archive(launch.input))
    steps.done("gate container")
    structure += docker_proof.container(where, Role.GATE, spec, await engine.container(name), running=False)
    if not structure and await standing():
        async with attached(engine, name, stdin=True, output=said.take, tasks=tasks) as streams:
            await engine.start(name)
            steps.done("gate started")
            asked = await when()
            if asked is not None:
                await streams.write(json.dumps(asked.question.to_object()).encode("ascii"))
            streams.close_input()
            with anyio.move_on_after(_GATE_S):
                state = await until_ended(engine, name)
                await streams.ended.wait()
            if asked is not None and said.report() is None:
                structure.append(f"the gate gave no report: {await how_it_ended(engine, name)}")
    if asked is None:
        return Unheard(tuple(structure))
    question = asked.question
    report = judge(
        said.report(),
        challenge=question.challenge,
        answer=question.answer,
        targets=question.targets,
        arrivals=asked.canaries.arrivals(),
        rounds=question.rounds,
        interfaces=question.interfaces,
    )
    structure += docker_proof.runtime(where, report.runtime.get("kernel"))
    if state is None or (state["ExitCode"] != 0 and report.passed):
        structure.append("the gate's exit status is not 0")
    return Heard(report=report, structure=tuple(structure), diagnostics=said.diagnostics)


def question(
    where: Where,
    launch: Launch,
    *,
    canaries: Canaries,
    addresses: Sequence[str],
    resolvers: Sequence[tuple[str, int]],
) -> Question:
    """Give what the gate is asked: everything of the host, by every way that a container could have to it.

    Args:
        where: the run's place.
        launch: the run.
        canaries: the daemon's own listeners.
        addresses: every address of the host.
        resolvers: every resolver that the host uses.
    """
    challenge = secrets.token_hex(16)
    slices = where.slices
    own = {(slices.proxy, PROXY_PORT)}
    listeners = canaries.targets
    return gate_targets.Question(
        proxy=f"{slices.proxy}:{PROXY_PORT}",
        challenge=challenge,
        answer=gate_targets.answer(launch.proxy.proof_key, challenge),
        targets=gate_targets.targets(
            canaries=(
                *listeners,
                *gate_targets.bound(listeners),
                *_at(slices.gateway, listeners),
                # Bound to its own link a sandbox finds the proxy's other address too: it must not listen there.
                gate_targets.bound_to(slices.outside, PROXY_PORT),
            ),
            addresses=(*addresses, slices.gateway, slices.outside),
            nameservers=(*launch.proxy.resolvers, *resolvers),
            neighbours=[
                (slices.outside, PROXY_PORT),
                *(neighbour for neighbour in launch.neighbours if neighbour not in own),
            ],
            inner_resolver=True,
        ),
        rounds=_ROUNDS,
        interval=_INTERVAL_S,
        budget=_BUDGET_S,
        interfaces=("lo", "eth0"),
        near=_NEAR_S,
        control=f"{slices.proxy}:{PROXY_PORT}",
    )


def _at(address: str, canaries: Sequence[Target]) -> tuple[Target, ...]:
    """Give the network listeners again at an address that the host should not have: where a gateway would be."""
    return tuple(
        replace(each, name=f"gateway {each.kind}:{address}:{each.port}", address=address, alive=False)
        for each in canaries
        if each.kind in (TargetKind.TCP, TargetKind.UDP) and each.address == "127.0.0.1"
    )


class _Said:
    """What a gate says, cut."""

    def __init__(self) -> None:
        self._report = bytearray()
        self._diagnostics = b""

    def take(self, stream: Stream, data: bytes) -> None:
        """Take in a piece."""
        if stream is Stream.STDERR:
            self._diagnostics = (self._diagnostics + data)[-_KEPT_DIAGNOSTICS:]
        elif len(self._report) <= _MOST_REPORT:
            self._report += data

    @property
    def diagnostics(self) -> str:
        """What it wrote to stderr, cut."""
        return self._diagnostics.decode("utf-8", "replace").strip()

    def report(self) -> object:
        """Read the report; None where there is none."""
        try:
            return json.loads(self._report) if len(self._report) <= _MOST_REPORT else None
        except ValueError:
            return None
