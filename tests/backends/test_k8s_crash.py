"""A daemon that is killed at any step of a launch: the reaper removes what it left; without one, the cluster does."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends.k8s import K8s
from tests.backends import k8s_world
from tests.backends.k8s_world import K8sKind, objects

if TYPE_CHECKING:
    from tests.backends.k8s_world import Backends
    from tests.rig.k8s import Cluster

pytestmark = [pytest.mark.k8s, pytest.mark.rig, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
KIND = K8sKind(gvisor=False)
STEPS = ["anchor", "policies", "proxy ready", "agent pod", "node guard", "gate", "started", "teardown"]


def killed(backends: Backends, runtime: Path, owner: str, *, step: str, seconds: int) -> None:
    """Launch in a process of its own that is killed at a step."""
    settings = backends.settings(KIND).k8s
    said = dataclasses.asdict(settings) | {"kubeconfig": str(settings.kubeconfig)}
    image = backends.standing(KIND.setup).agent
    run = f"test-{secrets.token_hex(4)}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.backends.killed", step, run, owner, str(runtime)),
            *("k8s", image, str(seconds), json.dumps(said)),
        ],
        cwd=ROOT,
        check=False,
        timeout=120,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def left(cluster: Cluster, seconds: float) -> list[str]:
    """Wait until nothing of any run is in the cluster; what is after that time."""
    until = time.monotonic() + seconds
    while (found := objects(cluster)) and time.monotonic() < until:
        time.sleep(0.5)
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_daemon_killed_at_any_step_leaves_nothing_after_the_reaper(
    k8s_backends: Backends, rig_runtime: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    owner = f"killed-{os.getpid()}"
    with k8s_world.beside(k8s_backends.standing(KIND.setup).cluster, monkeypatch) as cluster:
        killed(k8s_backends, rig_runtime, owner, step=step, seconds=300)
        assert objects(cluster) != []
        after = K8s(k8s_backends.settings(KIND), owner)
        assert anyio.run(after.reap, frozenset())
        assert left(cluster, 60) == []
        assert anyio.run(after.reap, frozenset()) == ()
    assert list((rig_runtime / "k8s" / owner).glob("*")) == []


@pytest.mark.parametrize("step", ["anchor", "agent pod", "started"])
def test_a_daemon_killed_for_good_leaves_nothing_after_the_deadline(
    k8s_backends: Backends, rig_runtime: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with k8s_world.beside(k8s_backends.standing(KIND.setup).cluster, monkeypatch) as cluster:
        killed(k8s_backends, rig_runtime, f"forgotten-{os.getpid()}", step=step, seconds=40)
        assert objects(cluster) != []
        assert left(cluster, 150) == []
