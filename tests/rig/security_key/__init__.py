"""Owns OpenSSH's security key in software, which its regression tests use: how it is built, and where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.rig.docker.cache import DESTINATION, Part

_HERE: Final = Path(__file__).parent
BUILD: Final = "python -m tests.rig.security_key"


def security_key() -> Part:
    """Return the provider, as DESTINATION/sk-dummy.so: what `ssh-keygen -w` and SSH_SK_PROVIDER name."""
    script = _HERE / "build.sh"
    return Part(name="security-key", inputs=(script,), command=(str(script), DESTINATION))
