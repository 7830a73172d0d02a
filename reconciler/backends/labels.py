"""Owns the labels that everything of ours carries, wherever it is made, and when they say that it is past its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "ringfence."
OWNER, RUN, ROLE, AGENT, EXPIRES = (f"{PREFIX}{word}" for word in ("owner", "run", "role", "agent", "expires"))
"""The daemon, the run, the part it plays, the agent, and Unix seconds past which it may not exist."""


def expired(told: Mapping[str, str], now: float) -> bool:
    """Say whether what carries these labels is past its time at `now` (Unix seconds)."""
    expires = told.get(EXPIRES, "")
    return expires.isascii() and expires.isdigit() and now > int(expires)
