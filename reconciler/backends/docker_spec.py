"""Owns what one run is made of on a Docker engine, as the plain data that its API takes; creates nothing.

Pure. What an inspection must show of it afterwards is judged elsewhere, from the same data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reconciler.backends.docker_place import Role
from reconciler.backends.nft import NOWHERE, PROXY_PORT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reconciler.backends.base import Launch
    from reconciler.backends.docker_place import Where
    from reconciler.backends.docker_versions import Hazards
    from reconciler.core.policy import Limits

WORKING_DIRECTORY = "/job"
HOSTNAME = "sandbox"
PROXY_PROGRAM, GATE_PROGRAM = "/usr/bin/ringfence-proxy", "/usr/bin/ringfence-gate"
PROXY_USER = "65532:65532"
"""The image's own unprivileged user."""
_DRIVER = "com.docker.network.bridge"
_NOWHERE_V6 = "100::1"
"""Of the range that is discarded wherever it gets (RFC 6666)."""
_MOST_SHM = 64 * 1024 * 1024
_PROXY_MEMORY, _PROXY_PIDS, _PROXY_CPUS = 256 * 1024 * 1024, 32, 1.0
_GVISOR_PIDS = 128
"""gVisor's own threads on the host count too: with fewer it does not start, or ends when the command forks."""
_GVISOR_MEMORY = 64 * 1024 * 1024
"""What gVisor itself takes of the limit."""
_FILES, _MOST_FILES = 1024, 4096
"""Soft and hard limit of open files: the hard one bounds what the kernel holds for them and charges to nobody."""
_LOG = {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "2"}}
"""The engine's own copy of the outputs. What we keep was read off the streams."""

Plain = dict[str, Any]


def fence_network(where: Where, hazards: Hazards) -> Plain:
    """Give the network whose only other member is the proxy, with no address of the host on it."""
    options = {f"{_DRIVER}.name": where.fence_link}
    config = [{"Subnet": str(where.slices.fence)}]
    if hazards.isolated:
        options |= {f"{_DRIVER}.gateway_mode_ipv4": "isolated"}
        if where.ipv6:
            # Without it the bridge keeps its link-local address; the mode counts only where IPv6 is on.
            options |= {f"{_DRIVER}.gateway_mode_ipv6": "isolated"}
            config.append({"Subnet": where.slices.fence6})
    else:
        options |= {f"{_DRIVER}.inhibit_ipv4": "true"}
    return {
        "name": where.name(Role.FENCE),
        "driver": "bridge",
        "internal": True,
        "enable_ipv6": hazards.isolated and where.ipv6,
        "options": options,
        "ipam": {"Driver": "default", "Config": config},
        "labels": where.labels(Role.FENCE),
    }


def egress_network(where: Where) -> Plain:
    """Give the network over which this run's proxy alone reaches the world."""
    options = {f"{_DRIVER}.name": where.egress_link, f"{_DRIVER}.enable_icc": "false"}
    return {
        "name": where.name(Role.EGRESS),
        "driver": "bridge",
        "internal": False,
        "enable_ipv6": False,
        "options": options,
        "ipam": {"Driver": "default", "Config": [{"Subnet": str(where.slices.egress)}]},
        "labels": where.labels(Role.EGRESS),
    }


def proxy_container(where: Where, image: str) -> Plain:
    """Give the proxy: born on the egress network, then put on the fence, where alone it listens."""
    limits = _bounds(where, memory=_PROXY_MEMORY, pids=_PROXY_PIDS, cpus=_PROXY_CPUS, shm=1 << 20)
    return {
        **_container(where, Role.PROXY, image=image, user=PROXY_USER, limits=limits),
        "Entrypoint": [PROXY_PROGRAM],
        "Cmd": ["--listen", f"{where.slices.proxy}:{PROXY_PORT}"],
        "OpenStdin": True,
        # The end of our side is the end of its input, and that is its end.
        "StdinOnce": True,
        "NetworkingConfig": _on(where.name(Role.EGRESS), where.slices.outside),
    }


def gate_container(where: Where, image: str, launch: Launch) -> Plain:
    """Give the agent's twin from our own image; the job's files are written through it, so its volume is writable."""
    made = _sandboxed(where, Role.GATE, image=image, launch=launch, volumes=(), writable=True)
    return {**made, "Entrypoint": [GATE_PROGRAM], "Cmd": [], "Env": [], "OpenStdin": True, "StdinOnce": True}


def agent_container(where: Where, image: str, launch: Launch, volumes: Iterable[str]) -> Plain:
    """Give the agent. `volumes` are those that the image declares: they become file systems in memory."""
    made = _sandboxed(where, Role.AGENT, image=image, launch=launch, volumes=volumes, writable=False)
    return {
        **made,
        "Entrypoint": list(launch.command),
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in environment(where, launch.environment).items()],
        "WorkingDir": WORKING_DIRECTORY,
    }


def environment(where: Where, given: Mapping[str, str]) -> dict[str, str]:
    """Give what the agent gets over its image's environment: what finds the proxy, over the job's, over defaults."""
    proxy = f"http://{where.slices.proxy}:{PROXY_PORT}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return {
        "HOME": "/tmp",  # noqa: S108 - the sandbox's own
        **given,
        **{variant: proxy for name in names for variant in (name, name.lower())},
        "NO_PROXY": "",
        "no_proxy": "",
        "NODE_USE_ENV_PROXY": "1",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Bytes, processes, cores."""

    memory: int
    pids: int
    cpus: float
    shm: int


def _bounds(where: Where, *, memory: int, pids: int, cpus: float, shm: int) -> _Bounds:
    """Give what the engine is told so that what runs inside has this much: gVisor's own share comes on top."""
    if not where.gvisor:
        return _Bounds(memory=memory, pids=pids, cpus=cpus, shm=shm)
    return _Bounds(memory=memory + _GVISOR_MEMORY, pids=pids + _GVISOR_PIDS, cpus=cpus, shm=shm)


def _command_bounds(where: Where, limits: Limits) -> _Bounds:
    """Give what the engine is told so that the command has what its policy says."""
    # Under runc an init of one process stands beside the command's.
    pids = limits.pids if where.gvisor else limits.pids + 1
    shm = min(_MOST_SHM, limits.memory // 4)
    return _bounds(where, memory=limits.memory, pids=pids, cpus=limits.cpus, shm=shm)


def _sandboxed(
    where: Where, role: Role, *, image: str, launch: Launch, volumes: Iterable[str], writable: bool
) -> Plain:
    """Give what the gate and the agent have in common: the same network, address, runtime, user, limits, hardening."""
    user = f"{launch.user}:{launch.user}"
    made = _container(where, role, image=image, user=user, limits=_command_bounds(where, launch.limits))
    size = launch.limits.memory // 2
    tmp = f"rw,nosuid,nodev,exec,size={size},mode=1777"
    made["HostConfig"] |= {
        "Tmpfs": {"/tmp": tmp, **dict.fromkeys(sorted(volumes), tmp)},  # noqa: S108 - the sandbox's own
        "Mounts": [
            {
                "Type": "volume",
                "Source": where.name(Role.JOB),
                "Target": WORKING_DIRECTORY,
                "VolumeOptions": {"NoCopy": True},
                **({} if writable else {"ReadOnly": True}),
            }
        ],
    }
    return {**made, "NetworkingConfig": _on(where.name(Role.FENCE), where.slices.inside)}


def _filter(where: Where, role: Role) -> tuple[str, ...]:
    if where.gvisor:
        return ()
    return (f"seccomp={where.filters.proxy if role is Role.PROXY else where.filters.sandbox}",)


def _nameserver(role: Role) -> str:
    """Give the server that an engine has to ask for whoever looks a name up: one that tells nobody anything.

    Names are the proxy's. On a fence there is no IPv6, so that such a server cannot even be asked. One of IPv4 could,
    along the route to nowhere that old engines make, and would be waited for: they end a container no earlier.
    """
    return NOWHERE if role is Role.PROXY else _NOWHERE_V6


def _on(network: str, address: str) -> Plain:
    return {"EndpointsConfig": {network: {"IPAMConfig": {"IPv4Address": address}}}}


def _container(where: Where, role: Role, *, image: str, user: str, limits: _Bounds) -> Plain:
    """Give what all three have in common; every choice that the engine would make by itself is made here."""
    network = where.name(Role.EGRESS if role is Role.PROXY else Role.FENCE)
    sysctls = {"net.ipv4.ip_forward": "0"}
    if role is not Role.PROXY:
        # No group may open unprivileged ICMP sockets.
        sysctls["net.ipv4.ping_group_range"] = "1 0"
    if where.ipv6:
        sysctls |= {f"net.ipv6.conf.{which}.disable_ipv6": "1" for which in ("all", "default")}
    return {
        "Image": image,
        "User": user,
        "Hostname": HOSTNAME,
        "Domainname": "",
        "Tty": False,
        "OpenStdin": False,
        "AttachStdin": False,
        "AttachStdout": True,
        "AttachStderr": True,
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": where.labels(role),
        "HostConfig": {
            "Runtime": where.runtime,
            "NetworkMode": network,
            "PidMode": "",
            "IpcMode": "private",
            "UTSMode": "",
            "CgroupnsMode": "private",
            "UsernsMode": "",
            "Privileged": False,
            "CapAdd": [],
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges", *_filter(where, role)],
            "ReadonlyRootfs": True,
            "Memory": limits.memory,
            "MemorySwap": limits.memory,
            "NanoCpus": round(limits.cpus * 1_000_000_000),
            "PidsLimit": limits.pids,
            "ShmSize": limits.shm,
            "Ulimits": [
                {"Name": "core", "Soft": 0, "Hard": 0},
                {"Name": "nofile", "Soft": _FILES, "Hard": _MOST_FILES},
            ],
            "Init": not where.gvisor and role is Role.AGENT,
            "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
            "AutoRemove": False,
            "LogConfig": _LOG,
            "Dns": [_nameserver(role)],
            "DnsSearch": ["."],
            "DnsOptions": [],
            "ExtraHosts": [],
            "Binds": [],
            "Devices": [],
            "PortBindings": {},
            "PublishAllPorts": False,
            "VolumesFrom": [],
            "Sysctls": sysctls,
        },
    }
