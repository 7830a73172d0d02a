"""Owns the wall clock, and that time never goes back for ringfence; does not store the last time seen."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def now(self) -> datetime:
        """Give the time, aware and in UTC; never before an earlier answer."""


class SystemClock:
    """The host's clock, held at the last time seen while it is set back: no expired reason comes to life again."""

    __slots__ = ("_last",)

    def __init__(self, last_seen: datetime | None = None) -> None:
        self._last = last_seen

    def now(self) -> datetime:
        """Give max(clock, last time seen), aware and in UTC."""
        wall = datetime.now(UTC)  # noqa: TID251 - this is the one place that reads the clock
        self._last = wall if self._last is None else max(self._last, wall)
        return self._last

    def advance(self, last_seen: datetime) -> None:
        """Take in a time that was seen before this process started."""
        self._last = last_seen if self._last is None else max(self._last, last_seen)
