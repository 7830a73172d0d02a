"""Owns doing things at the same time of which none needs another; knows nothing of what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

A = TypeVar("A")
B = TypeVar("B")


class Later(Generic[A]):
    """One value that is not known yet, for whoever does something beside who finds it out."""

    __slots__ = ("_known", "_values")

    def __init__(self) -> None:
        """Know nothing."""
        self._known = anyio.Event()
        self._values: list[A] = []

    def set(self, value: A) -> None:
        """Make it known; the first value counts."""
        self._values.append(value)
        self._known.set()

    async def get(self) -> A:
        """Wait until it is known."""
        await self._known.wait()
        return self._values[0]


async def both(first: Callable[[], Awaitable[A]], second: Callable[[], Awaitable[B]]) -> tuple[A, B]:
    """Await both. The first failure ends the other and is raised as it is, not in a group."""
    mine: list[A] = []
    other: list[B] = []

    async def run_first() -> None:
        mine.append(await first())

    async def run_second() -> None:
        other.append(await second())

    await side_by_side(run_first, run_second)
    return mine[0], other[0]


async def side_by_side(*calls: Callable[[], Awaitable[A]]) -> list[A]:
    """Await all; what they gave, in their order. The first failure ends the others and is raised as it is."""
    made: dict[int, A] = {}

    async def run(number: int, call: Callable[[], Awaitable[A]]) -> None:
        made[number] = await call()

    try:
        async with anyio.create_task_group() as tasks:
            for number, call in enumerate(calls):
                tasks.start_soon(run, number, call)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [made[number] for number in range(len(calls))]
