"""Owns `ringfence run --dry-run`: the plan of a run, from what the daemon and the state say; creates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reconciler.backends.base import Planned
from reconciler.clock import SystemClock
from reconciler.commands.console import Code, complain, say, say_json
from reconciler.commands.effective import effective_lines, stored
from reconciler.commands.status import read_status
from reconciler.core import request
from reconciler.core.choose import Available, Chosen, Missing, Probe, choose
from reconciler.core.job import Admitted, Cancel, RefusalCode, Refused, admit
from reconciler.core.policy import BackendName, Isolation, in_force
from reconciler.daemon import built_in
from reconciler.host import Host
from reconciler.prepare import ProxySettings, expiry, launch_of, owner_of, resolvers_of
from reconciler.run import RESOLV_CONF

_RUN = "RUN-ID"
"""Stands for the id that the daemon would mint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DryRun:
    """What a job would become."""

    admitted: Admitted
    chosen: Chosen
    creates: tuple[Planned, ...]


def show_plan(host: Host, data: bytes, *, submitter: str, json: bool) -> int:
    """Print what the job in `data` would become here; gives the exit status, 125 where it would be refused."""
    found = _dry_run(host, data, submitter)
    if isinstance(found, Refused):
        if json:
            say_json({"refused": {"code": found.code, "message": found.message}})
        else:
            complain(f"would be refused: {found.code}: {found.message}")
        return Code.REFUSED
    chosen = found.chosen
    if json:
        creates = [{"kind": one.kind, "name": one.name, "detail": one.detail} for one in found.creates]
        backend = {"backend": chosen.backend.value, "isolation": chosen.isolation.value, "why": list(chosen.why)}
        say_json({"refused": None, **backend, "creates": creates})
        return Code.FINE
    say(f"backend {chosen.backend}, which isolates by {chosen.isolation}")
    for line in chosen.why:
        say(f"  not {line}")
    say("would create, in this order:")
    for one in found.creates:
        say(f"  {one.kind:<10} {one.name}: {one.detail}")
    say(f"in force for agents/{found.admitted.effective.agent.name}, revision {found.admitted.revision}:")
    for line in effective_lines(found.admitted.effective):
        say(line)
    return Code.FINE


def _dry_run(host: Host, data: bytes, submitter: str) -> _DryRun | Refused:
    state = stored(host)
    policy = None
    if state.memory.in_force is not None:
        policy = in_force(
            state.memory.in_force, state.memory.last, revision=state.revision, generation=state.generation
        )
    job = request.read(data)
    if isinstance(job, Refused):
        return job
    if isinstance(job, Cancel):
        return Refused(RefusalCode.BAD_JOB, "a cancel runs nothing")
    admitted = admit(job, submitter=submitter, in_force=policy, required_egress=host.required_egress)
    if isinstance(admitted, Refused):
        return admitted
    if policy is None:
        return Refused(RefusalCode.NO_POLICY, "no policy was ever accepted on this host")
    chosen = choose(policy.platform, admitted.effective.agent, _probes(host))
    resolvers = resolvers_of(host, RESOLV_CONF)
    if isinstance(chosen, Refused):
        return chosen
    if isinstance(resolvers, Refused):
        return resolvers
    proxy = ProxySettings(
        run=_RUN,
        resolvers=resolvers,
        nat64_prefixes=host.nat64_prefixes,
        proof_key=bytes(32),  # nothing is launched with it
        expires_at=expiry(admitted, SystemClock().now().timestamp()),
    )
    owner = owner_of(host)
    launch = launch_of(
        admitted,
        run=_RUN,
        owner=owner,
        environment=admitted.job.env,
        proxy=proxy.policy(admitted.effective, admitted.revision, admitted.generation),
        neighbours=(),
    )
    creates = built_in(host, owner)[chosen.backend].plan(launch)
    return _DryRun(admitted=admitted, chosen=chosen, creates=creates)


def _probes(host: Host) -> dict[BackendName, Probe]:
    """What the daemon's probes found; a backend that it has not probed yet is not among them."""
    published: list[dict[str, Any]] = (read_status(host) or {}).get("backends", [])
    found: dict[BackendName, Probe] = {}
    for one in published:
        name = BackendName(one["name"])
        match one["state"]:
            case "available":
                isolation = Isolation(one["isolation"])
                found[name] = Available(
                    backend=name, isolation=isolation, versions=one["versions"], evidence=tuple(one["evidence"])
                )
            case "missing":
                found[name] = Missing(backend=name, code=one["code"], message=one["message"])
            case _:
                pass
    return found
