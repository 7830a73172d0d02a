"""Owns loading the host guard into the kernel and reading it back; what it says is written elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass

from reconciler.backends import nft

_CALL_S = 10.0
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
NO_NFT = "nft is not installed (Debian: apt-get install nftables); the host guard needs it"


@dataclass(frozen=True, slots=True)
class GuardFailed:
    """The guard is not in place; each of `lines` says what about it."""

    lines: tuple[str, ...]


def check() -> GuardFailed | None:
    """Read the guard back; None when it is in place exactly as it must be."""
    program = _program()
    if program is None:
        return GuardFailed((NO_NFT,))
    shown = _run(program, "-j", "list", "table", nft.FAMILY, nft.TABLE)
    if shown.returncode:
        return GuardFailed((f"the table {nft.FAMILY} {nft.TABLE} is not loaded",))
    try:
        listed = json.loads(shown.stdout)
    except ValueError:
        return GuardFailed(("nft answers what is no JSON",))
    lines = nft.differences(listed)
    return GuardFailed(lines) if lines else None


def load() -> GuardFailed | None:
    """Load the guard in place of what it was, and read it back; None when it is in place then."""
    program = _program()
    if program is None:
        return GuardFailed((NO_NFT,))
    done = _run(program, "-f", "-", given=nft.text())
    if done.returncode:
        return GuardFailed((f"nft does not load the guard: {done.stderr.strip()[:300]}",))
    return check()


def _program() -> str | None:
    return shutil.which("nft") or shutil.which("nft", path=_PATH)


def _run(program: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], input=given, text=True, capture_output=True, timeout=_CALL_S, check=False
    )
