"""Owns `ringfence guard`: printing the host guard for its unit, loading it, and checking that it is in place."""

from __future__ import annotations

import os

import typer

from reconciler.backends import guard as host_guard
from reconciler.backends import nft
from reconciler.commands.console import Code, complain, leave, say


def show() -> None:
    """Print the ruleset, for /etc/ringfence/guard.nft and the unit ringfence-guard.service."""
    typer.echo(nft.text(), nl=False)


def load() -> None:
    """Load the ruleset in place of what our table was, and read it back. It touches no other table."""
    _say(host_guard.load() if _is_root() else None)


def check() -> None:
    """Say whether the ruleset is in place exactly as it must be. Changes nothing."""
    _say(host_guard.check() if _is_root() else None)


def _is_root() -> bool:
    if os.geteuid() != 0:
        complain("the kernel's rules are root's: run it as root")
        leave(Code.PROBLEMS)
    return True


def _say(failed: host_guard.GuardFailed | None) -> None:
    if failed is None:
        say(f"the host guard (table {nft.FAMILY} {nft.TABLE}) is in place")
        return
    for line in failed.lines:
        complain(line)
    leave(Code.PROBLEMS)
