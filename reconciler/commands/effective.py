"""Owns `ringfence effective` and `explain`: what is in force for an agent, where it comes from, what it lets pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer

from proxy.decision import Deny
from proxy.entry import BadEntry, Entry, parse_port
from reconciler.commands.console import (
    HOST_CONFIG,
    Code,
    HostConfig,
    Json,
    complain,
    host_settings,
    leave,
    say,
    say_json,
)
from reconciler.config_pass import snapshot_of
from reconciler.core.hostnames import parse_entry
from reconciler.core.origin import kept, origins
from reconciler.core.policy import Effective, InForce, Layer, asked_for, in_force
from reconciler.core.reference import weakenings
from reconciler.core.replay import decide
from reconciler.core.units import TO_COME
from reconciler.core.written import written
from reconciler.host import Host
from reconciler.snapshot import Snapshot
from reconciler.state import State, StateBroken, StateFile

_WEB = 443
_WAITS = "held: waits for a signed reason (ringfence plan)"
_HELD = f"the document lists it; {_WAITS}"
Agent = Annotated[str, typer.Argument(help="The agent, or '*' for those to come.")]


def effective(
    agent: Agent,
    host_config: HostConfig = HOST_CONFIG,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say of each entry which document and line it is in.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what is in force for one agent on this host: its lists, the organisation's layers, limits, reasons.

    With '*': the layers that an agent starts under which no document names yet.
    """
    host = host_settings(host_config)
    state = stored(host)
    held = _in_force(state)
    if agent == TO_COME:
        _to_come(held, state, json=json)
        return
    one = _one(held, agent)
    gone, waits = kept(agent, one.layers, state.memory.last), _held(one, state)
    told = []
    if origin:
        snapshot = snapshot_of(host)
        if not isinstance(snapshot, Snapshot) or snapshot.digest != held.revision:
            complain("the policy directory is not what is in force now: lines are those of the directory")
        told = list(origins(one, snapshot.files if isinstance(snapshot, Snapshot) else {}, state.memory.grants))
    if json:
        value = {"revision": held.revision, "enabled": held.platform.enabled, **_effective_json(one), "kept": gone}
        value["held_allow"] = [str(entry) for entry in waits]
        say_json({**value, "origins": [dataclasses.asdict(found) for found in told]} if origin else value)
        return
    say(f"agents/{agent}, revision {held.revision}, sandboxes are {'on' if held.platform.enabled else 'off'}")
    for line in effective_lines(one):
        say(line)
    for entry in waits:
        say(f"  allow {entry}: {_HELD}")
    for layer in gone:
        say(f"  {_kept(layer, agent)}")
    for found in told:
        say(f"  {found}")


def explain(
    agent: Annotated[str | None, typer.Argument(help="The agent.")] = None,
    target: Annotated[str | None, typer.Argument(metavar="HOST[:PORT]", help="What it would ask for.")] = None,
    host_config: HostConfig = HOST_CONFIG,
    weakening: Annotated[
        bool, typer.Option("--weakenings", help="Instead: every field, and in which direction it loosens.")
    ] = False,
    json: Json = False,
) -> None:
    """Say whether an agent's target would pass by name, and which list or layer says no; looks nothing up.

    Exits 0 when it passes the lists, 1 when it does not.
    """
    if weakening:
        typer.echo(weakenings(), nl=False)
        return
    if agent is None or target is None:
        raise typer.BadParameter("name an agent and a target, or --weakenings", param_hint="AGENT HOST[:PORT]")
    if "://" in target:
        raise typer.BadParameter(f"{target} is a URL, not a host: write HOST[:PORT]", param_hint="HOST[:PORT]")
    name, _, port_text = target.partition(":")
    entry, port = parse_entry(name), parse_port(port_text) if port_text else _WEB
    if isinstance(entry, BadEntry) or entry.wildcard or port is None:
        message = entry.message if isinstance(entry, BadEntry) else "write one host name and one port"
        raise typer.BadParameter(message, param_hint="HOST[:PORT]")
    host = host_settings(host_config)
    state = stored(host)
    held = _in_force(state)
    one = _one(held, agent)
    found = decide(one, entry.host, port)
    denied = isinstance(found, Deny)
    layer = found.layer if isinstance(found, Deny) else None
    if json:
        code, message = (found.code, found.message) if isinstance(found, Deny) else ("allowed", "")
        value = {"agent": agent, "host": entry.host, "port": port, "passes": not denied, "code": code, "layer": layer}
        say_json({**value, "message": message, "revision": held.revision})
    elif isinstance(found, Deny):
        say(f"denied [{found.code}] by {layer}: {found.message}")
        if not isinstance(decide(asked_for(one, state.memory.last), entry.host, port), Deny):
            say(_HELD if layer == "agent" else f"the documents let it pass; {_WAITS}")
        for name in kept(agent, one.layers, state.memory.last):
            if layer == f"egress/{name}":
                say(_kept(name, agent))
    else:
        layers = ", ".join(f"egress/{one.name}" for one in one.layers)
        lists = f"passes the agent's own lists and {layers}"
        if not layers:
            lists = "passes the agent's own lists; no egress document is over it"
        say(f"{lists}; then every address that it resolves to has to be public")
    if not held.platform.enabled:
        complain("sandboxes are off: nothing runs at all")
    leave(Code.PROBLEMS if denied else Code.FINE)


def _in_force(state: State) -> InForce:
    if state.memory.in_force is None:
        complain("no policy was ever accepted on this host: every job is refused")
        leave(Code.PROBLEMS)
    return in_force(state.memory.in_force, state.memory.last, revision=state.revision, generation=state.generation)


def _to_come(held: InForce, state: State, *, json: bool) -> None:
    """Show what an agent starts under that no document names yet."""
    gone = kept(TO_COME, held.to_come, state.memory.last)
    if json:
        layers = [_layer_json(layer) for layer in held.to_come]
        say_json({"revision": held.revision, "agent": TO_COME, "layers": layers, "kept": gone})
        return
    say(f"agents to come, revision {held.revision}: {len(held.to_come)} egress documents limit whoever joins")
    for line in _layer_lines(held.to_come):
        say(line)
    for layer in gone:
        say(f"  {_kept(layer, TO_COME)}")


def _kept(layer: str, agent: str) -> str:
    whom = "every agent" if agent == TO_COME else agent
    grant = f'{{document: egress/{layer}, field: /agents, remove: "{agent}"}}'
    return f"egress/{layer} does not select {whom} any more and is kept: a signed reason that grants {grant} lifts it"


def _held(one: Effective, state: State) -> tuple[Entry, ...]:
    """Give what the agent's document allows and is not in force."""
    asked = asked_for(one, state.memory.last).agent.allow
    return tuple(entry for entry in asked if entry not in one.agent.allow)


def _one(held: InForce, agent: str) -> Effective:
    one = held.agents.get(agent)
    if one is None:
        known = ", ".join(sorted(held.agents)) or "none"
        complain(f"no agent {agent!r} is in force: its jobs are refused; agents in force: {known}")
        leave(Code.PROBLEMS)
    return one


def stored(host: Host) -> State:
    """What the daemon of this host remembers; ends the command when that cannot be read."""
    state = StateFile(host.state).load()
    if isinstance(state, StateBroken):
        complain(f"what is in force cannot be read (are you root?): {state.message}")
        leave(Code.PROBLEMS)
    return state


def effective_lines(one: Effective) -> list[str]:
    """What is in force for one agent, for people; the dry run of a job prints the same."""
    agent = one.agent
    limits = written(f"agents/{agent.name}", "/limits", dataclasses.asdict(agent.limits))
    lines = [
        f"  image {agent.image}, isolation at least {agent.minimum_isolation}, uid {agent.user} inside",
        f"  allow {_list(agent.allow)}",
        f"  deny  {_list(agent.deny)}",
    ]
    lines += [
        *_layer_lines(one.layers),
        f"  submitters {_list(agent.submitters)}; variables {_list(agent.env_allow)}; secrets {_list(agent.secrets)}",
        f"  limits {', '.join(f'{name} {value}' for name, value in limits.items())}",
        f"  signed reasons in use: {_list(one.reasons)}",
    ]
    if one.blocked:
        lines.append(f"  does not launch: no value is in force for {', '.join(one.blocked)}")
    return lines


def _layer_lines(layers: Iterable[Layer]) -> Iterator[str]:
    for layer in layers:
        default = "everything public" if layer.default_allow else "nothing"
        yield f"  and egress/{layer.name}: {default}, allow {_list(layer.allow)}, deny {_list(layer.deny)}"
        if layer.deny_ranges:
            yield f"      never an address in {', '.join(layer.deny_ranges)}"


def _list(items: object) -> str:
    return ", ".join(str(item) for item in items) or "none"  # type: ignore[attr-defined]  # any iterable


def _layer_json(layer: Layer) -> dict[str, object]:
    return {
        "document": f"egress/{layer.name}",
        "default": "allow" if layer.default_allow else "deny",
        "allow": [str(entry) for entry in layer.allow],
        "deny": [str(entry) for entry in layer.deny],
        "deny_ranges": list(layer.deny_ranges),
    }


def _effective_json(one: Effective) -> dict[str, object]:
    agent = one.agent
    return {
        "agent": agent.name,
        "image": agent.image,
        "minimum_isolation": agent.minimum_isolation.value,
        "user": agent.user,
        "allow": [str(entry) for entry in agent.allow],
        "deny": [str(entry) for entry in agent.deny],
        "layers": [_layer_json(layer) for layer in one.layers],
        "submitters": list(agent.submitters),
        "env": list(agent.env_allow),
        "secrets": sorted(agent.secrets),
        "limits": dataclasses.asdict(agent.limits),
        "blocked": list(one.blocked),
        "reasons": list(one.reasons),
    }
