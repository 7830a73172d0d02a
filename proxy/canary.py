"""Owns the canary port: a listener that is really alive, answers nothing, and reports who reached it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Canary(asyncio.Protocol):
    """One arrival: reported, then closed."""

    __slots__ = ("_arrived",)

    def __init__(self, arrived: Callable[[str], None]) -> None:
        self._arrived = arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Report the peer's address and close."""
        peer = transport.get_extra_info("peername")
        self._arrived(str(peer[0]) if peer else "")
        transport.close()
