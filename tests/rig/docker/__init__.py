"""A Docker engine inside the rig's host namespace, and images made without a registry. Start at README.md."""

from tests.rig.docker.engine import Engine, Firewall, Runtime, Store, Which, sweep

__all__ = ["Engine", "Firewall", "Runtime", "Store", "Which", "sweep"]
