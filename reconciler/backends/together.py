"""Owns doing things at the same time of which none needs another; knows nothing of what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

A = TypeVar("A")
B = TypeVar("B")


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
