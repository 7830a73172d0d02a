"""Owns what an engine and the host's kernel must show of a run's objects, compared with what was asked for.

Pure. An engine stores and shows options that it does not understand, so what it shows is never the only proof.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reconciler.backends.docker_place import Role
from reconciler.backends.docker_spec import WORKING_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from reconciler.backends.docker_place import Where
    from reconciler.backends.docker_spec import Plain
    from reconciler.backends.links import Bridge

_NEVER = (
    "Binds",
    "Devices",
    "DeviceRequests",
    "DeviceCgroupRules",
    "PortBindings",
    "PublishAllPorts",
    "ExtraHosts",
    "Links",
    "VolumesFrom",
    "CapAdd",
    "GroupAdd",
    "Privileged",
    "PidMode",
    "UTSMode",
    "UsernsMode",
    "AutoRemove",
)
"""Settings that no container of a fence has, whatever it was asked for."""
_JUDGED_BELOW = frozenset({"MaskedPaths", "ReadonlyPaths"})
_MASKED = frozenset({"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"})
_READ_ONLY = frozenset({"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"})
_CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_SECCOMP_FILTER = "2"
_INTERFACES = frozenset({"lo", "eth0", "eth1"})
_CONFIG = ("User", "Entrypoint", "Cmd", "Env", "Tty", "OpenStdin", "Hostname", "Domainname", "Healthcheck", "Labels")
_LONGEST_VALUE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What /proc says of a running container's first process. `network`: inode of its network namespace."""

    network: int
    interfaces: tuple[str, ...]
    status: Mapping[str, str]


def container(where: Where, role: Role, spec: Plain, found: Plain | None, *, running: bool) -> tuple[str, ...]:
    """Compare an inspected container with its specification; each line names one thing that is not as it must be."""
    if found is None:
        return (f"{role}: the container is gone",)
    lines = [
        *_settings(spec["HostConfig"], found["HostConfig"]),
        *_command(spec, found),
        *_mounts(where, role, found.get("Mounts") or []),
        *_attachment(where, role, found["NetworkSettings"], running=running),
    ]
    network = where.name(Role.EGRESS if role is Role.PROXY else Role.FENCE)
    if found["HostConfig"].get("NetworkMode") != network:
        lines.append(f"its network is {_cut(found['HostConfig'].get('NetworkMode'))}")
    if found["State"]["Running"] != running:
        lines.append("it runs" if found["State"]["Running"] else "it does not run")
    if found.get("ExecIDs"):
        lines.append("somebody executes something in it")
    return tuple(f"{role}: {line}" for line in lines)


def _settings(wanted: Mapping[str, Any], shown: Mapping[str, Any]) -> Iterable[str]:
    for key, value in wanted.items():
        if shown.get(key) != value and not (_is_empty(shown.get(key)) and _is_empty(value)):
            yield f"{key} is {_cut(shown.get(key))}"
    for key, value in shown.items():
        # What was not asked for must not be there, whatever a newer engine calls it.
        if key not in wanted and key not in _JUDGED_BELOW and not _is_empty(value):
            yield f"{key} is {_cut(value)}"
    for key in _NEVER:
        if not _is_empty(wanted.get(key)):
            yield f"{key} was asked for"
    if not set(shown.get("MaskedPaths") or ()) >= _MASKED:
        yield "paths of /proc and /sys are not masked"
    if not set(shown.get("ReadonlyPaths") or ()) >= _READ_ONLY:
        yield "paths of /proc are not read-only"


def _command(spec: Plain, found: Plain) -> Iterable[str]:
    if found["Image"] != spec["Image"]:
        yield f"the image is {found['Image']}"
    config = found["Config"]
    for key in _CONFIG:
        value, shown = spec.get(key), config.get(key)
        if key == "Labels":
            # The image's own labels are among them.
            same = set(value.items()) <= set((shown or {}).items()) if isinstance(value, dict) else False
        elif key == "Env":
            same = set(value or ()) <= set(shown or ())
        else:
            same = shown == value or (_is_empty(shown) and _is_empty(value))
        if not same:
            # Values of the environment are secret.
            yield f"{key} is not as asked for" if key in ("Env", "Entrypoint", "Cmd") else f"{key} is {_cut(shown)}"


def _mounts(where: Where, role: Role, shown: list[Plain]) -> Iterable[str]:
    wanted = (
        [] if role is Role.PROXY else [("volume", where.name(Role.JOB), WORKING_DIRECTORY, "local", role is Role.GATE)]
    )
    found = [
        (mount.get("Type"), mount.get("Name"), mount.get("Destination"), mount.get("Driver"), mount.get("RW"))
        for mount in shown
        # In memory and asked for by name: compared with the settings.
        if mount.get("Type") != "tmpfs"
    ]
    if found != wanted:
        yield f"mounts are {_cut(found)}"


def _attachment(where: Where, role: Role, shown: Plain, *, running: bool) -> Iterable[str]:
    slices = where.slices
    wanted = (
        {where.name(Role.EGRESS): slices.outside, where.name(Role.FENCE): slices.proxy}
        if role is Role.PROXY
        else {where.name(Role.FENCE): slices.inside}
    )
    networks = shown.get("Networks") or {}
    if set(networks) != set(wanted):
        yield f"networks are {', '.join(sorted(networks))}"
    for name, address in wanted.items():
        endpoint = networks.get(name) or {}
        asked = (endpoint.get("IPAMConfig") or {}).get("IPv4Address")
        given = endpoint.get("IPAddress")
        if asked != address or (running and given != address):
            yield f"its address on {name} is {given or asked or 'none'}"
    if shown.get("Ports"):
        yield f"ports are published: {_cut(shown['Ports'])}"


def network(where: Where, role: Role, spec: Plain, found: Plain | None, members: Collection[Role]) -> tuple[str, ...]:
    """Compare an inspected network with its specification; `members` are the only containers that may be on it."""
    if found is None:
        return (f"{role}: the network is gone",)
    lines = []
    for key, wanted in (
        ("Driver", spec["driver"]),
        ("Internal", spec["internal"]),
        ("EnableIPv6", spec["enable_ipv6"]),
        ("Options", spec["options"]),
        ("Attachable", False),
        ("Ingress", False),
    ):
        if found.get(key) != wanted:
            lines.append(f"{key} is {_cut(found.get(key))}")
    if not set(spec["labels"].items()) <= set((found.get("Labels") or {}).items()):
        lines.append("its labels are not ours")
    if _subnets(found["IPAM"].get("Config")) != _subnets(spec["ipam"]["Config"]):
        lines.append(f"its ranges are {_cut(found['IPAM'].get('Config'))}")
    allowed = {where.name(member) for member in members}
    strangers = {str(each.get("Name")) for each in (found.get("Containers") or {}).values()} - allowed
    lines += [f"{name} is on it" for name in sorted(strangers)]
    return tuple(f"{role}: {line}" for line in lines)


def _subnets(config: list[Plain] | None) -> set[object]:
    return {ipaddress.ip_network(each["Subnet"]) for each in config or ()}


def bridge(name: str, found: Bridge | None, soft: tuple[str, ...], *, most_ports: int) -> tuple[str, ...]:
    """Judge a fence's bridge as the host's kernel shows it: it must be there, without an address, and hard."""
    if found is None:
        where = "the engine runs in another network namespace than ringfenced, or did not make it"
        return (f"bridge {name} is not on this host: {where}",)
    lines = [f"bridge {name} has the host's address {address}" for address in found.addresses]
    lines += [f"bridge {name}: {setting}" for setting in soft]
    if len(found.ports) > most_ports:
        lines.append(f"bridge {name} has {len(found.ports)} ports: {', '.join(found.ports)}")
    return tuple(lines)


def process(where: Where, role: Role, observed: Observed, *, own_network: int, user: int) -> tuple[str, ...]:
    """Judge a running container's first process as the host's kernel shows it."""
    lines = []
    if observed.network == own_network:
        lines.append("it is in the host's network namespace")
    if strange := set(observed.interfaces) - (_INTERFACES if role is Role.PROXY else _INTERFACES - {"eth1"}):
        lines.append(f"it has the interfaces {', '.join(sorted(strange))}")
    if not where.gvisor:
        # Under gVisor that process is gVisor's own, which has shut itself in.
        status = observed.status
        lines += [f"{name} is {status.get(name)}" for name in _CAPABILITY_SETS if int(status.get(name, "1"), 16)]
        lines += [
            f"{name} is {status.get(name)}" for name in ("Uid", "Gid") if set(status[name].split()) != {str(user)}
        ]
        if status.get("NoNewPrivs") != "1":
            lines.append("no_new_privs is off")
        if status.get("Seccomp") != _SECCOMP_FILTER:
            lines.append("no system call filter is loaded")
    return tuple(f"{role}: {line}" for line in lines)


def runtime(where: Where, kernel: object) -> tuple[str, ...]:
    """Judge by the kernel that the gate saw whether it ran under the runtime that was asked for."""
    text = str(kernel)
    seen = "gvisor" in text.lower() or text.startswith("Linux version 4.4.0 ")
    if seen == where.gvisor:
        return ()
    return (f"runtime: asked for {where.runtime}, and the gate saw {text[:80]!r}",)


def _is_empty(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_empty(each) for each in value)
    return value in (None, "", 0, False, {})


def _cut(value: object) -> str:
    return repr(value)[:_LONGEST_VALUE]
