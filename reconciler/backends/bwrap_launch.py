"""Owns the building of one bubblewrap fence: its steps in their order, and the proof before the command.

Does not undo (the steps do), does not run the command, does not probe.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import proxy
from reconciler.backends import (
    bwrap_args,
    bwrap_process,
    bwrap_proof,
    canary,
    gate_targets,
    host_network,
    host_root,
    input_files,
    leftovers,
    mountinfo,
    proxy_process,
)
from reconciler.backends.base import Launch, LaunchRefused, Observer
from reconciler.backends.bwrap_sandbox import BwrapSandbox, Proven, word
from reconciler.backends.cgroup import Cgroup
from reconciler.backends.uids import NoUid, allocate
from reconciler.core.gate_report import Target, judge
from reconciler.core.policy import HOST_IMAGE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup

    from reconciler.backends.bwrap_process import BwrapProcess
    from reconciler.backends.bwrap_surroundings import Surroundings
    from reconciler.backends.steps import Steps
    from reconciler.host import Host

_INSIDE_S = 10.0
_READY_S = 10.0
_GATE_BUDGET_S = 10.0
_GATE_ROUNDS = 2
_GATE_INTERVAL_S = 0.02
_OWN_PROCESSES = 2
"""bwrap's outer process and its init, beside the command's."""
_PROXY_MEMORY, _PROXY_PIDS, _PROXY_CPUS = 256 * 1024 * 1024, 16, 1.0
_PROXY = f"{bwrap_args.PROXY_ADDRESS[0]}:{bwrap_args.PROXY_ADDRESS[1]}"
_NAMED_FAILURES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where and with what one daemon builds: `group` is above its control groups, `folder` above its runs' own."""

    host: Host
    surroundings: Surroundings
    group: str
    folder: Path


async def build(
    site: Site, launch: Launch, observer: Observer, steps: Steps, tasks: TaskGroup
) -> BwrapSandbox | LaunchRefused:
    """Take the steps in their order; whatever was taken is undone by the caller."""
    if refused := _unusable(launch):
        return refused
    uid = steps.take("uid", _uid(site.host))
    if isinstance(uid, NoUid):
        return LaunchRefused(code="no_uid", message=uid.message)
    folder = steps.take("run directory", leftovers.run_folder(site.folder, launch))
    inside = await steps.take_async("sandbox cgroup", _cgroup(site, launch, "sandbox"))
    limits = launch.limits
    inside.limit(memory=limits.memory, pids=limits.pids + _OWN_PROCESSES, cpus=limits.cpus)
    beside = await steps.take_async("proxy cgroup", _cgroup(site, launch, "proxy"))
    beside.limit(memory=_PROXY_MEMORY, pids=_PROXY_PIDS, cpus=_PROXY_CPUS)
    addresses = host_network.addresses()
    # Only until the gate has been heard: afterwards whoever scans this host would find them.
    with canary.open_canaries(folder, addresses) as canaries:
        steps.done("canaries")
        place = _Place(uid=uid, inside=inside, beside=beside, canaries=canaries, addresses=addresses)
        return await _raise(site, launch, observer, steps, tasks, place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What stands when the fence itself is raised; `inside` and `beside`: the sandbox's control group, the proxy's."""

    uid: int
    inside: Cgroup
    beside: Cgroup
    canaries: canary.Canaries
    addresses: tuple[str, ...]


async def _raise(
    site: Site, launch: Launch, observer: Observer, steps: Steps, tasks: TaskGroup, *, place: _Place
) -> BwrapSandbox | LaunchRefused:
    """Start the proxy and the sandbox, have the listener handed out, hear the gate."""
    found, limits, uid, inside = site.surroundings, launch.limits, place.uid, place.inside
    handed_out, received = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with handed_out, received:
        door = await steps.take_async(
            "proxy",
            proxy_process.start(
                launch.proxy,
                user=site.host.proxy_user,
                receive=received,
                cgroup=place.beside,
                tasks=tasks,
                observer=observer,
            ),
        )
        made = bwrap_args.fence(
            user=launch.user,
            memory=limits.memory,
            host=host_root.read(),
            files=launch.input,
            launcher=_program("launcher.py"),
            gate=_program("gate.py"),
        )
        process = await steps.take_async(
            "sandbox",
            bwrap_process.start(
                made,
                program=found.bwrap,
                python=site.host.python,
                uid=uid,
                seccomp=found.seccomp,
                cgroup=inside,
                handoff=handed_out,
                tasks=tasks,
                output=observer.output,
            ),
        )
    init = await process.until_inside(_INSIDE_S)
    if init is None:
        return LaunchRefused(
            code="fence_failed",
            message=f"bwrap did not build the fence: {process.diagnostics or 'it said nothing'}",
        )
    expected = bwrap_proof.Expected(
        uid=uid,
        user=launch.user,
        mounts=bwrap_args.mounts(made, _own_mounts()),
        # Read later, from init: while it builds, bwrap still moves on to its last user namespace.
        namespaces={},
        daemon_namespaces=bwrap_proof.namespaces("thread-self"),
    )
    question = _question(site.host, launch, place.canaries.targets, place.addresses)
    await process.say(question.to_object())
    if unready := await door.until_ready(_READY_S):
        return LaunchRefused(code="proxy_failed", message=f"{unready.message} {process.diagnostics}".strip())
    steps.done("listener handed out")
    proven = await _prove(process, inside, expected, place.canaries, question)
    if isinstance(proven, LaunchRefused):
        return proven
    steps.done("gate")
    environment = bwrap_args.environment(made, launch.environment)
    sandbox = BwrapSandbox(
        process=process, proxy=door, cgroup=inside, proven=proven, word=word(launch.command, environment)
    )
    tasks.start_soon(sandbox.stop_when_proxy_dies)
    return sandbox


def _question(
    host: Host, launch: Launch, canaries: tuple[Target, ...], addresses: tuple[str, ...]
) -> gate_targets.Question:
    challenge = secrets.token_hex(16)
    own = {bwrap_args.PROXY_ADDRESS}
    return gate_targets.Question(
        proxy=_PROXY,
        challenge=challenge,
        answer=gate_targets.answer(launch.proxy.proof_key, challenge),
        targets=gate_targets.targets(
            canaries=canaries,
            addresses=addresses,
            nameservers=[*launch.proxy.resolvers, *host_network.resolvers(host.resolvers)],
            neighbours=[neighbour for neighbour in launch.neighbours if neighbour not in own],
        ),
        rounds=_GATE_ROUNDS,
        interval=_GATE_INTERVAL_S,
        budget=_GATE_BUDGET_S,
    )


async def _prove(
    process: BwrapProcess,
    inside: Cgroup,
    expected: bwrap_proof.Expected,
    canaries: canary.Canaries,
    question: gate_targets.Question,
) -> Proven | LaunchRefused:
    """Hear the gate, count arrivals, read the structure from outside; all of it must hold."""
    said = await process.gate_answer(_GATE_BUDGET_S + _READY_S)
    raw = said.get("gate") if isinstance(said, dict) else None
    report = judge(
        raw,
        challenge=question.challenge,
        answer=question.answer,
        targets=question.targets,
        arrivals=canaries.arrivals(),
        rounds=question.rounds,
        interfaces=question.interfaces,
    )
    structure: list[str] = []
    facts: tuple[str, ...] = ()
    limits = inside.limits()
    pids = inside.pids() - {process.pid}
    if process.init in pids:
        expected = replace(expected, namespaces=bwrap_proof.namespaces(process.init))
    else:
        structure.append("the sandbox's first process is gone")
    for pid in sorted(pids):
        try:
            observed = bwrap_proof.observe(pid, listening=True)
        except (OSError, KeyError):
            structure.append("a process ended before its command")
            continue
        structure += bwrap_proof.differences(observed, expected, filtered=True, listening=True)
        if not inside.holds(observed.cgroup):
            structure.append("a process is outside the limits")
        facts = bwrap_proof.evidence(observed, expected, limits)
    if len(pids) < _OWN_PROCESSES:
        structure.append("the launcher is gone")
    if isinstance(said, dict) and said.get("exit") != 0 and report.passed:
        structure.append("the gate's exit status is not 0")
    failures = tuple(dict.fromkeys((*report.failures, *structure)))
    if failures:
        judged = replace(report, passed=False, failures=failures)
        return LaunchRefused(code="gate_failed", message=_gate_message(failures, process.diagnostics), report=judged)
    return Proven(report=report, evidence=facts, expected=expected, limits=limits)


@contextlib.asynccontextmanager
async def _cgroup(site: Site, launch: Launch, role: str) -> AsyncIterator[Cgroup]:
    cgroup = Cgroup(site.surroundings.roots, f"{site.group}/{launch.run}.{role}")
    cgroup.create()
    try:
        yield cgroup
    finally:
        if not await leftovers.empty(cgroup):
            raise OSError(f"processes in {cgroup.name} do not end")


def _unusable(launch: Launch) -> LaunchRefused | None:
    if launch.image != HOST_IMAGE:
        return LaunchRefused(
            code="image_needs_backend",
            message=f"bubblewrap runs only `image: {HOST_IMAGE}`: name a backend that can run {launch.image}",
        )
    for name in launch.input:
        if input_files.unusable_name(name):
            return LaunchRefused(code="bad_input", message=f"input file {name!a} is not a plain relative path")
    return None


def _uid(host: Host) -> contextlib.AbstractContextManager[int | NoUid]:
    return allocate(host.runtime / "bubblewrap.uids", first=host.uid_first, count=host.uid_count)


def _program(name: str) -> bytes:
    """Read one of the two programs that run inside: their text is handed over, no path of this installation."""
    return (Path(proxy.__file__).parent / name).read_bytes()


def _own_mounts() -> tuple[mountinfo.Mount, ...]:
    return mountinfo.parse(Path("/proc/thread-self/mountinfo").read_text("utf-8", "surrogateescape"))


def _gate_message(failures: tuple[str, ...], diagnostics: str) -> str:
    named = "; ".join(failures[:_NAMED_FAILURES])
    more = f" and {len(failures) - _NAMED_FAILURES} more" if len(failures) > _NAMED_FAILURES else ""
    return f"the gate did not prove the fence: {named}{more}" + (f" ({diagnostics})" if diagnostics else "")
