"""A ringfenced that breaks the fence of each agent that is named after one of `BREAKS`, and of no other.

Everything else is the real daemon. The probe's canary run stays whole, so that the host has bubblewrap. Runs must come
one at a time: what is broken is broken in the whole process. Does not judge what the gate makes of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anyio

from reconciler import daemon
from reconciler.backends import bwrap_args, bwrap_launch, bwrap_process, proxy_process
from reconciler.backends.bubblewrap import Bubblewrap
from reconciler.core.policy import BackendName
from reconciler.host import Host, load_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from anyio.abc import TaskGroup

    from reconciler.backends.base import Backend, Launch, LaunchRefused, Observer, Sandbox
    from reconciler.backends.steps import Steps

BOUND = "/tmp/somebody.sock"  # noqa: S108 - a path inside the sandbox
LYING_GATE = b"""
import json, sys
given = json.loads(sys.stdin.readline())
anchor = {"address": given["proxy"], "answer": "0" * 64, "verdict": "reached", "seen": "answered"}
print(json.dumps({"version": 1, "kind": "gate-report", "passed": True, "challenge": given["challenge"],
    "anchor": anchor, "targets": [], "rounds": given["rounds"], "runtime": {"interfaces": ["lo"]}, "arrivals": [],
    "failures": [], "elapsed_ms": 1}))
"""


class Broken(Bubblewrap):
    """Bubblewrap, but with the fences of some agents broken."""

    async def _build(
        self, launch: Launch, observer: Observer, steps: Steps, tasks: TaskGroup
    ) -> Sandbox | LaunchRefused:
        breaking = BREAKS.get(launch.agent)
        with contextlib.nullcontext() if breaking is None else breaking(self._host):
            return await super()._build(launch, observer, steps, tasks)


@contextlib.contextmanager
def arguments(change: Callable[[list[str]], list[str]]) -> Iterator[None]:
    """Change what bwrap is told."""
    real = bwrap_args.arguments

    def changed(*given: Any) -> tuple[str, ...]:
        return tuple(change(list(real(*given))))

    with patch.object(bwrap_args, "arguments", changed):
        yield


def shared_network(_host: Host) -> contextlib.AbstractContextManager[None]:
    """Leave the sandbox in the host's network namespace."""
    return arguments(lambda given: [argument for argument in given if argument != "--unshare-net"])


def bound_socket(host: Host) -> contextlib.AbstractContextManager[None]:
    """Bind a live socket of the host in, at a path of its own."""
    socket = str(host.runtime.parent / "somebody.sock")
    return arguments(lambda given: [*given[: given.index("--remount-ro")], "--ro-bind", socket, BOUND, *rest(given)])


def bound_runtime(host: Host) -> contextlib.AbstractContextManager[None]:
    """Bind the daemon's runtime directory in, at its own path: the canary's socket is in it."""
    runtime = str(host.runtime)
    return arguments(lambda given: [*given[: given.index("--remount-ro")], "--ro-bind", runtime, runtime, *rest(given)])


def rest(given: list[str]) -> list[str]:
    """What comes once the mounts are made."""
    return given[given.index("--remount-ro") :]


@contextlib.contextmanager
def wrong_key(_host: Host) -> Iterator[None]:
    """Start a proxy that holds another proof key than the daemon thinks."""
    real = proxy_process.start

    def start(policy: Any, **given: Any) -> Any:
        return real(replace(policy, proof_key=secrets.token_bytes(32)), **given)

    with patch.object(proxy_process, "start", start):
        yield


@contextlib.contextmanager
def open_descriptor(host: Host) -> Iterator[None]:
    """Let the sandbox inherit a descriptor of a directory of the host."""
    real = bwrap_process._spawn
    directory = os.open(host.state, os.O_RDONLY)

    def spawn(command: Any, *, uid: int, passed: Any) -> Any:
        return real(command, uid=uid, passed=(*passed, directory))

    try:
        with patch.object(bwrap_process, "_spawn", spawn):
            yield
    finally:
        os.close(directory)


@contextlib.contextmanager
def lying_gate(_host: Host) -> Iterator[None]:
    """Put a gate in place that looks at nothing and says that all is well."""
    real = bwrap_launch._program
    with patch.object(bwrap_launch, "_program", lambda name: LYING_GATE if name == "gate.py" else real(name)):
        yield


def no_filter(_host: Host) -> contextlib.AbstractContextManager[None]:
    """Leave the system call filter out."""

    def change(given: list[str]) -> list[str]:
        at = given.index("--seccomp")
        return given[:at] + given[at + 2 :]

    return arguments(change)


BREAKS: Mapping[str, Callable[[Host], contextlib.AbstractContextManager[None]]] = {
    each.__name__.replace("_", "-"): each
    for each in (shared_network, bound_socket, bound_runtime, wrong_key, open_descriptor, lying_gate, no_filter)
}
"""By the name of the agent."""


def main() -> None:
    """Run the daemon with the breaking backend until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host-config", type=Path, required=True)
    given = parser.parse_args()

    def backends(host: Host, owner: str) -> Mapping[BackendName, Backend]:
        return {BackendName.BUBBLEWRAP: Broken(host, owner)}

    host = load_host(given.host_config)
    assert isinstance(host, Host), host
    parts = daemon.open_parts(host, backends)
    assert not isinstance(parts, str), parts
    with parts.closing:
        anyio.run(daemon.Daemon(parts).serve)


if __name__ == "__main__":
    main()
