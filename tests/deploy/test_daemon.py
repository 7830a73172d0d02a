"""ringfenced inside a cluster, set up as the guide says, with its node guard: what it finds, and a run through it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.deploy.manifests import K3S, PROXY_IMAGE
from tests.e2e import documents
from tests.signing import line, make_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deploy.conftest import Deployed
    from tests.rig.k8s import Cluster

pytestmark = [pytest.mark.k8s, pytest.mark.rig, pytest.mark.timeout(900)]

HOST = "k3s-1"
SYNC = """
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
files = json.loads(sys.argv[1])
for name, text in files.items():
    path = "/policy/.worktrees/abc/" + name
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
os.symlink(".worktrees/abc", "/policy/.current.tmp")
os.rename("/policy/.current.tmp", "/policy/current")
time.sleep(1e6)
"""
"""What git-sync does, as far as the daemon sees it: a work tree of its own user's, and a link to it."""


def policy(place: Path, image: str) -> tuple[dict[str, str], str]:
    """Write a policy with one agent and sign what it loosens; its files, and a line of allowed_signers."""
    (place / "reasons").mkdir(parents=True)
    (place / "agents").mkdir()
    files = {
        "platform.yaml": documents.platform(backend="k8s"),
        "agents/helper.yaml": documents.agent(image=image, minimum_isolation="gvisor"),
    }
    for name, text in files.items():
        (place / name).write_text(text)
    key = make_key(place.parent, "alice")
    trust = place.parent / "trust"
    trust.mkdir()
    (trust / "allowed_signers").write_text(line("alice", key))
    (trust / "revoked").write_text("")
    statement = place / "reasons" / "CHG-1.yaml"
    argv = [
        str(Path(sys.executable).with_name("ringfence")),
        "plan",
        str(place),
        "--against",
        "floor",
        "--as-host",
        HOST,
    ]
    argv += [
        "--trust",
        str(trust / "allowed_signers"),
        "--emit-reason",
        str(statement),
        "--reason",
        "a test of the guide",
    ]
    done = subprocess.run(argv, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    files["reasons/CHG-1.yaml"] = statement.read_text()
    files["reasons/CHG-1.alice.sig"] = key.sign(statement.read_bytes()).decode()
    return files, line("alice", key)


def replaced(path: Path, old: str, new: str) -> None:
    """Change a file as an operator would; it must hold what is changed."""
    text = path.read_text()
    assert old in text, (path, old)
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def ringfenced(deployed: Deployed, daemon_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The daemon and the node guard, applied with kustomize from a copy of the checkout with the five things set."""
    cluster, place = deployed.cluster, tmp_path_factory.mktemp("operator")
    files, signer = policy(place / "policy", deployed.agent)
    own = place / "k3s"
    shutil.copytree(K3S, own)
    name, _, digest = daemon_image.partition("@")
    zeros = f"newName: {name}\n    digest: sha256:{'0' * 64}"
    replaced(own / "kustomization.yaml", zeros, f"newName: {name}\n    digest: {digest}")
    replaced(own / "daemon" / "host.yaml", PROXY_IMAGE, deployed.proxy)
    with (own / "daemon" / "allowed_signers").open("a") as file:
        file.write(signer)
    overlay = place / "overlay"
    overlay.mkdir()
    stand_in = [
        {"op": "replace", "path": "/spec/template/spec/initContainers/1/image", "value": deployed.agent},
        {
            "op": "add",
            "path": "/spec/template/spec/initContainers/1/command",
            "value": ["python3", "-c", SYNC, json.dumps(files)],
        },
    ]
    patches = [{"target": {"kind": "Deployment", "name": "ringfenced"}, "patch": json.dumps(stand_in)}]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../k3s"],
        "patches": patches,
    }
    (overlay / "kustomization.yaml").write_text(json.dumps(kustomization))
    # What a cluster with a provisioner would make.
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "ringfenced"},
            "spec": {
                "capacity": {"storage": "10Gi"},
                "accessModes": ["ReadWriteOnce"],
                "hostPath": {"path": "/run/ringfence-volume", "type": "DirectoryOrCreate"},
                "claimRef": {"namespace": "ringfence", "name": "ringfenced"},
            },
        }
    )
    done = cluster.kubectl("apply", "--server-side", "--force-conflicts", "-k", overlay)
    assert done.returncode == 0, done.stderr
    for what in (("ringfence", "deployment/ringfenced"), ("ringfence-guard", "daemonset/node-guard")):
        done = cluster.kubectl("-n", what[0], "rollout", "status", what[1], "--timeout=240s", timeout_s=250)
        assert done.returncode == 0, done.stdout + done.stderr + _said(cluster)
    yield cluster
    for namespace, kind in (("ringfence", "deployment/ringfenced"), ("ringfence-guard", "daemonset/node-guard")):
        cluster.kubectl("-n", namespace, "delete", kind, "--wait", check=True, timeout_s=150)
    cluster.kubectl("-n", "ringfence", "delete", "pvc/ringfenced", "--wait=false", check=True)
    cluster.kubectl("delete", "pv/ringfenced", "--wait=false", check=True)


def _said(cluster: Cluster) -> str:
    logs = [
        cluster.kubectl("-n", "ringfence", "logs", "deployment/ringfenced", "-c", each).stdout for each in CONTAINERS
    ]
    events = cluster.kubectl("-n", "ringfence", "get", "events").stdout
    asked = _exec(cluster, "/usr/bin/ringfence", "status")
    return "\n".join([*logs, events, asked.stdout, asked.stderr])


CONTAINERS = ("volumes", "git-sync", "ringfenced")


def _exec(cluster: Cluster, *command: str, seconds: float = 200) -> subprocess.CompletedProcess[str]:
    inside = ("-n", "ringfence", "exec", "deployment/ringfenced", "-c", "ringfenced", "--")
    return cluster.kubectl(*inside, *command, timeout_s=seconds)


def status(cluster: Cluster) -> dict[str, Any]:
    """What the daemon published."""
    found: dict[str, Any] = json.loads(_exec(cluster, "/usr/bin/ringfence", "status", "--json").stdout)
    return found


def test_it_runs_a_job_in_the_namespace_of_sandboxes_and_leaves_nothing(ringfenced: Cluster) -> None:
    probed = _exec(ringfenced, "/usr/bin/ringfence", "probe", "--json")
    backends = {each["name"]: each for each in json.loads(probed.stdout)["backends"]}
    assert backends["k8s"].get("isolation") == "gvisor", backends["k8s"]
    done = _exec(ringfenced, "/usr/bin/ringfence", "run", "helper", "--", "/usr/bin/python3", "-c", 'print("hello")')
    assert (done.returncode, done.stdout.strip()) == (0, "hello"), done.stderr + _said(ringfenced)
    until = time.monotonic() + 30
    while left := ringfenced.get("/api/v1/namespaces/agent-sandbox/pods")["items"]:
        assert time.monotonic() < until, [each["metadata"]["name"] for each in left]
        time.sleep(0.5)
    audit = _exec(ringfenced, "/usr/bin/ringfence", "audit", "verify")
    assert audit.returncode == 0, audit.stderr


def test_what_it_keeps_is_there_after_its_pod_was_replaced(ringfenced: Cluster) -> None:
    before = status(ringfenced)["policy"].get("revision")
    ringfenced.kubectl("-n", "ringfence", "rollout", "restart", "deployment/ringfenced", check=True)
    done = ringfenced.kubectl(
        "-n", "ringfence", "rollout", "status", "deployment/ringfenced", "--timeout=200s", timeout_s=210
    )
    assert done.returncode == 0, done.stderr + _said(ringfenced)
    after = status(ringfenced)
    assert after["running"]
    assert before is None or after["policy"]["revision"] == before
    assert _exec(ringfenced, "/usr/bin/ringfence", "audit", "verify").returncode == 0
