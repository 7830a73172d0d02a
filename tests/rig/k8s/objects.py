"""Owns objects of the API as plain data: what every cluster of the rig starts with, pods of tests; creates none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.rig.k8s.plan import DNS_SERVICE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LABELS: Final = {"k8s-app": "kube-dns"}
"""What policies select a cluster's DNS by."""


def pod(
    name: str,
    image: str,
    command: Sequence[str],
    *,
    labels: Mapping[str, str] | None = None,
    runtime: str | None = None,
) -> dict[str, object]:
    """Return a pod of `default` that runs a command once; `image`: a reference by digest, `runtime`: a RuntimeClass."""
    container = {"name": "c", "image": image, "imagePullPolicy": "Never", "command": list(command)}
    spec: dict[str, object] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    if runtime is not None:
        spec["runtimeClassName"] = runtime
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels or {}}, "spec": spec}


def standing(image: str, resolver: str, *, gvisor: bool) -> list[dict[str, object]]:
    """Return them; `image`: one with Python, by digest; `resolver`: the address that the DNS pod forwards to."""
    source = (Path(__file__).parent / "dns.py").read_text()
    container = {
        "name": "dns",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", source, resolver],
        "readinessProbe": {"tcpSocket": {"port": 53}, "periodSeconds": 1},
    }
    pod: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "dns", "namespace": "kube-system", "labels": _LABELS},
        "spec": {
            "dnsPolicy": "Default",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
        },
    }
    ports = [{"name": kind.lower(), "port": 53, "protocol": kind} for kind in ("UDP", "TCP")]
    service: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": _LABELS},
        "spec": {"clusterIP": DNS_SERVICE, "selector": _LABELS, "ports": ports},
    }
    runtime: dict[str, object] = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "gvisor"},
        "handler": "runsc",
    }
    return [service, pod, *([runtime] if gvisor else [])]
