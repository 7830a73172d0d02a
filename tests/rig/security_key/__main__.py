"""Builds the security key in software where it is not built: `python -m tests.rig.security_key` (root, for apt-get)."""

from __future__ import annotations

import sys

from tests.rig.docker.cache import build
from tests.rig.security_key import security_key

if __name__ == "__main__":
    build(security_key())
    sys.stdout.write(f"{security_key().path}\n")
