"""A Docker engine inside the rig's host namespace, and images made without a registry. Start at README.md."""

from tests.rig.docker.engine import Engine, Firewall, Runtime, Store, Which
from tests.rig.docker.images import Image, agent_image_tar, proxy_image_tar

__all__ = [
    "Engine",
    "Firewall",
    "Image",
    "Runtime",
    "Store",
    "Which",
    "agent_image_tar",
    "proxy_image_tar",
]
