"""Owns what the proxies that ours is compared with are built from, and the load that they are measured with; runs none.

They lie in the rig's cache under digests of their inputs, like the Docker rig's parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.rig.docker.cache import DESTINATION, Part
from tests.rig.rig import ROOT

HERE: Final = Path(__file__).parent
LOAD: Final = ROOT / "tests" / "bench" / "proxy" / "load.c"


def debian() -> Part:
    """Return Debian's Squid, tinyproxy and HAProxy, unpacked."""
    script = HERE / "build_debian.sh"
    return Part(name="peers", inputs=(script,), command=(str(script), DESTINATION))


def smokescreen() -> Part:
    """Return smokescreen, as DESTINATION/bin/smokescreen."""
    script, module = HERE / "build_smokescreen.sh", HERE / "smokescreen"
    return Part(name="smokescreen", inputs=(script, module), command=(str(script), str(module), DESTINATION))


def load() -> Part:
    """Return the load generator, as DESTINATION/load."""
    command = ("/bin/sh", "-euc", f'cc -O2 -Wall -Wextra -Werror -o "$1/load" "{LOAD}"', "sh", DESTINATION)
    return Part(name="load", inputs=(LOAD,), command=command)
