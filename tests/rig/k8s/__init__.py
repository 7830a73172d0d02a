"""A Kubernetes cluster of one node inside the rig's host namespace. Start at README.md."""

from tests.rig.k8s.cluster import Cluster, Request
from tests.rig.k8s.plan import API_SERVICE, DNS_SERVICE, GATEWAY, NODE, NODE_ADDRESS, PODS, SERVICES, Netpol

__all__ = [
    "API_SERVICE",
    "DNS_SERVICE",
    "GATEWAY",
    "NODE",
    "NODE_ADDRESS",
    "PODS",
    "SERVICES",
    "Cluster",
    "Netpol",
    "Request",
]
