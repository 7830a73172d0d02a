"""Owns which backend a run gets; knows probe results as values and never asks a backend anything itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from reconciler.core.job import RefusalCode, Refused
from reconciler.core.policy import HOST_IMAGE, BackendName, Isolation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.core.policy import Agent, Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """A backend whose canary run succeeded on this host: what it isolates with, and the evidence for it."""

    backend: BackendName
    isolation: Isolation
    versions: Mapping[str, str] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A backend that this host does not have: `code` for machines, `message` says what to install or set."""

    backend: BackendName
    code: str
    message: str


Probe = Available | Missing


def not_in_this_version(name: BackendName) -> Missing:
    """What a host has of a backend that this version of ringfence cannot drive."""
    message = f"this version of ringfence cannot drive {name}; name another backend, or let `auto` choose"
    return Missing(backend=name, code="not_in_this_version", message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The backend that a run gets. `why` says, a line each, why not a backend that would isolate more."""

    backend: BackendName
    isolation: Isolation
    versions: Mapping[str, str] = field(default_factory=dict)
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Unfit:
    """Why one backend does not fit, with the code that a refusal for it would carry."""

    code: RefusalCode
    message: str


def strength(isolation: Isolation) -> int:
    """Where an isolation ranks; larger isolates more."""
    return tuple(Isolation).index(isolation)


def choose(platform: Platform, agent: Agent, probes: Mapping[BackendName, Probe]) -> Chosen | Refused:
    """The backend that a run of `agent` gets on a host with these probe results.

    A backend that the platform names is taken or refused, never replaced. `auto` takes the strongest isolation
    that is there, that is at least the agent's minimum and that can run its image; equal ones in the order of
    `BackendName`.
    """
    named = platform.backend
    fits: list[Available] = []
    unfit: dict[BackendName, _Unfit] = {}
    for name in BackendName if named == "auto" else (BackendName(named),):
        match _fit(platform, agent, name, probes.get(name)):
            case Available() as available:
                fits.append(available)
            case _Unfit() as problem:
                unfit[name] = problem
            case unreachable:
                assert_never(unreachable)
    if not fits:
        return _refusal(platform, agent, unfit)
    best = max(fits, key=lambda available: strength(available.isolation))
    return Chosen(
        backend=best.backend,
        isolation=best.isolation,
        versions=best.versions,
        why=tuple(problem.message for problem in unfit.values()),
    )


def _fit(platform: Platform, agent: Agent, name: BackendName, probe: Probe | None) -> Available | _Unfit:
    match probe:
        case None:
            return _Unfit(RefusalCode.BACKEND_MISSING, f"{name}: not probed on this host (`ringfence probe`)")
        case Missing():
            return _Unfit(RefusalCode.BACKEND_MISSING, f"{name}: missing ({probe.code}): {probe.message}")
        case Available():
            return _judge(platform, agent, probe)
        case unreachable:
            assert_never(unreachable)


def _judge(platform: Platform, agent: Agent, probe: Available) -> Available | _Unfit:
    name = probe.backend
    if (agent.image == HOST_IMAGE) != (name is BackendName.BUBBLEWRAP):
        if agent.image == HOST_IMAGE:
            message = f"{name}: cannot run `image: host`; give the agent an image by digest"
        else:
            message = f"{name}: runs only `image: host`, and the agent's image is one by digest"
        return _Unfit(RefusalCode.IMAGE_NEEDS_BACKEND, message)
    if (
        platform.require_runtime_class
        and name is BackendName.K8S
        and strength(probe.isolation) < strength(Isolation.GVISOR)
    ):
        message = (
            f"{name}: the platform requires the gVisor RuntimeClass, and this cluster isolates by {probe.isolation}"
        )
        return _Unfit(RefusalCode.ISOLATION_TOO_LOW, message)
    if strength(probe.isolation) < strength(agent.minimum_isolation):
        message = (
            f"{name}: isolates by {probe.isolation}, below the agent's `minimum_isolation: {agent.minimum_isolation}`"
            " (lowering that needs a signed reason)"
        )
        return _Unfit(RefusalCode.ISOLATION_TOO_LOW, message)
    return probe


def _refusal(platform: Platform, agent: Agent, unfit: Mapping[BackendName, _Unfit]) -> Refused:
    details = "; ".join(problem.message for problem in unfit.values())
    if platform.backend == "auto":
        # What is nearest to working is what the operator can act on.
        nearest = (RefusalCode.ISOLATION_TOO_LOW, RefusalCode.IMAGE_NEEDS_BACKEND, RefusalCode.BACKEND_MISSING)
        code = next(code for code in nearest if code in {problem.code for problem in unfit.values()})
        return Refused(code, f"no backend of this host may run agents/{agent.name}: {details}")
    (problem,) = unfit.values()
    return Refused(problem.code, f"the platform names this backend, and it is never replaced by another: {details}")
