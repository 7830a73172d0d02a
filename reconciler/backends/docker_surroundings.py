"""Owns what a Docker host must have before a fence can be tried at all, and what to install where it does not.

Builds no fence: that all of this is there proves nothing yet.
"""

from __future__ import annotations

import os
import platform
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from reconciler.backends import docker_filter, docker_versions, guard, links
from reconciler.backends.docker_engine import EngineError
from reconciler.backends.docker_image import find_image
from reconciler.backends.docker_place import RUNC
from reconciler.core.choose import Missing
from reconciler.core.policy import BackendName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reconciler.backends.docker_engine import Engine
    from reconciler.backends.docker_filter import Filters
    from reconciler.backends.docker_versions import Hazards
    from reconciler.host import Host

_NEEDED = ("MemoryLimit", "SwapLimit", "PidsLimit", "CpuCfsQuota")
"""Limits that an engine drops with a warning where the kernel does not have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What was found: the engine's hazards, the runtime to use, the proxy image's id, and versions for the cache."""

    hazards: Hazards
    runtime: str
    proxy_image: str
    ipv6: bool
    filters: Filters
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What to try, the strongest runtime first; `skipped` says why a stronger one is not tried."""

    tries: tuple[Surroundings, ...]
    skipped: tuple[str, ...]


async def look(host: Host, engine: Engine) -> Candidates | Missing:
    """Look for everything that is needed, in the order in which it is needed."""
    settings = host.docker
    if os.geteuid() != 0:
        return _missing("not_root", "run ringfenced as root: it verifies bridges and loads the host guard")
    if settings.proxy_image is None:
        return _missing(
            "no_proxy_image",
            "name the proxy's image by digest as `proxy_image` below `docker` in host.yaml: build it (docker build -f"
            " deploy/images/proxy/Containerfile -t ringfence-proxy .), then docker image inspect --format '{{.Id}}'"
            " ringfence-proxy gives the digest of ringfence-proxy@sha256:...",
        )
    if not _is_socket(settings.socket):
        return _missing(
            "no_docker", f"{settings.socket} is no socket: install and start Docker (Debian: apt-get install docker.io)"
        )
    try:
        return await _ask(host, engine)
    except EngineError as error:
        return _missing("no_docker", f"the Docker engine at {settings.socket} does not answer: {error}")


async def _ask(host: Host, engine: Engine) -> Candidates | Missing:
    said = await engine.versions()
    version = docker_versions.parse(said.engine)
    if version is None:
        return _missing("no_version", f"the engine's version {said.engine!r} is none: what it does cannot be known")
    oldest = ".".join(map(str, docker_versions.OLDEST_ENGINE))
    if version < docker_versions.OLDEST_ENGINE:
        return _missing("engine_too_old", f"Docker {said.engine} is too old: install {oldest} or newer")
    if not engine.speak(said):
        return _missing(
            "engine_too_new", f"Docker {said.engine} speaks API {said.oldest_api} and newer: install a newer ringfence"
        )
    info = await engine.info()
    if unusable := _unusable(info):
        return unusable
    image = await find_image(engine, host.docker.proxy_image or "")
    if image is None:
        return _missing(
            "no_proxy_image",
            f"the Docker engine does not have {host.docker.proxy_image}: docker pull it, or docker load an archive",
        )
    if failed := await anyio.to_thread.run_sync(_guard):
        return _missing("no_guard", "; ".join(failed.lines))
    versions = {
        "engine": said.engine,
        "api": docker_versions.api(said.api, said.oldest_api) or "",
        "kernel": platform.release(),
        "proxy_image": image.id,
    }
    runtimes = info.get("Runtimes") or {}
    gvisor = _gvisor(host.docker.gvisor_runtime, runtimes)
    names = [RUNC] if isinstance(gvisor, str) else [gvisor.name, RUNC]
    tries = tuple(
        Surroundings(
            hazards=docker_versions.hazards(version),
            runtime=name,
            proxy_image=image.id,
            ipv6=links.has_ipv6(),
            filters=docker_filter.read(),
            versions=versions | {"runtime": _identity(name, runtimes.get(name) or {})},
        )
        for name in names
        if name in runtimes
    )
    if not tries:
        return _missing("no_runtime", "the engine has no runtime called runc: see `docker info`")
    return Candidates(tries=tries, skipped=(gvisor,) if isinstance(gvisor, str) else ())


def _unusable(info: Mapping[str, Any]) -> Missing | None:
    if info.get("OSType", "linux") != "linux":
        return _missing("not_linux", "the engine runs containers of another system than Linux")
    if lacking := [name for name in _NEEDED if not info.get(name)]:
        return _missing(
            "no_limits",
            f"the engine cannot bound containers ({', '.join(lacking)} off in `docker info`): boot with"
            " cgroup_enable=memory swapaccount=1, or cgroup v2",
        )
    options = info.get("SecurityOptions") or []
    seccomp = next((each for each in options if each.startswith("name=seccomp")), None)
    if seccomp is None or "profile=unconfined" in seccomp:
        return _missing(
            "no_seccomp", "the engine runs containers unconfined: remove `seccomp-profile` from daemon.json"
        )
    if any(each.startswith("name=rootless") for each in options):
        return _missing("rootless", "the engine runs rootless, where its bridges are out of sight: use a rootful one")
    return None


@dataclass(frozen=True, slots=True)
class _GVisor:
    name: str


def _gvisor(name: str | None, runtimes: Mapping[str, Any]) -> _GVisor | str:
    """Give the engine's gVisor runtime, or say why it is not used."""
    if name is None:
        return "gVisor is not used: `gvisor_runtime` is null in host.yaml"
    found = runtimes.get(name)
    if found is None:
        return (
            f"gVisor is not used: the engine has no runtime {name} (install runsc, then `runsc install` and restart"
            " Docker)"
        )
    arguments = tuple(map(str, found.get("runtimeArgs") or ()))
    unsafe = docker_versions.unsafe_runtime(arguments)
    if unsafe is not None:
        return (
            f"gVisor is not used: its runtimeArgs in daemon.json hold {unsafe}, which opens what it is there to close"
        )
    if found.get("options"):
        return f"gVisor is not used: runtime {name} has options in daemon.json, which cannot be judged: use `path`"
    return _GVisor(name)


def _identity(name: str, runtime: Mapping[str, Any]) -> str:
    """Tell one installed runtime from another: its path, size and time."""
    path = runtime.get("path") or runtime.get("runtimeType") or name
    try:
        facts = Path(str(path)).stat()
    except OSError:
        return f"{name} {path}"
    return f"{name} {path} {facts.st_size} {int(facts.st_mtime)}"


def _guard() -> guard.GuardFailed | None:
    return None if guard.check() is None else guard.load()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False


def _missing(code: str, message: str) -> Missing:
    return Missing(backend=BackendName.DOCKER, code=code, message=message)
