"""Owns the objects that every cluster of the rig starts with, as plain data: DNS, RuntimeClass; creates none."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.rig.k8s.plan import DNS_SERVICE

_LABELS: Final = {"k8s-app": "kube-dns"}
"""What policies select a cluster's DNS by."""


def objects(image: str, resolver: str, *, gvisor: bool) -> list[dict[str, object]]:
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
