"""Owns loading tables of ours into the kernel and reading them back; what they say is written elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconciler.backends import nft, nft_table

if TYPE_CHECKING:
    from reconciler.backends.nft_table import Table

_CALL_S = 10.0
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
NO_NFT = "nft is not installed (Debian: apt-get install nftables); the host guard needs it"
HOST = (nft.GUARD,)


@dataclass(frozen=True, slots=True)
class GuardFailed:
    """The guard is not in place; each of `lines` says what about it."""

    lines: tuple[str, ...]


def check(tables: tuple[Table, ...] = HOST) -> GuardFailed | None:
    """Read tables back; None when each is in place exactly as it must be, whatever its sets hold."""
    lines: list[str] = []
    for table in tables:
        found = listed(table)
        if isinstance(found, GuardFailed):
            return found
        lines += nft_table.differences(table, found)
    return GuardFailed(tuple(lines)) if lines else None


def load(tables: tuple[Table, ...] = HOST) -> GuardFailed | None:
    """Load tables in place of what they were, all or none, and read them back; None when they are in place then."""
    failed = change("".join(nft_table.text(table) for table in tables))
    return check(tables) if failed is None else failed


def listed(table: Table) -> dict[str, object] | GuardFailed | None:
    """Give what the kernel shows of a table; None when there is none."""
    program = _program()
    if program is None:
        return GuardFailed((NO_NFT,))
    shown = _run(program, "-j", "list", "table", table.family, table.name)
    if shown.returncode:
        return None
    try:
        found = json.loads(shown.stdout)
    except ValueError:
        return GuardFailed(("nft answers what is no JSON",))
    return found if isinstance(found, dict) else GuardFailed(("nft answers what is no listing",))


def change(text: str) -> GuardFailed | None:
    """Have nft do what a text says, in one transaction."""
    program = _program()
    if program is None:
        return GuardFailed((NO_NFT,))
    done = _run(program, "-f", "-", given=text)
    return GuardFailed((f"nft does not load the guard: {done.stderr.strip()[:300]}",)) if done.returncode else None


def _program() -> str | None:
    return shutil.which("nft") or shutil.which("nft", path=_PATH)


def _run(program: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], input=given, text=True, capture_output=True, timeout=_CALL_S, check=False
    )
