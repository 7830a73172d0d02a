"""Owns the order of a launch: named steps, each of which registers its undo before the next starts.

Knows no backend; a failed undo is reported and the others still happen.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from proxy.record import Record
    from reconciler.backends.base import Observer, Stream

T = TypeVar("T")
UNDO_S = 30.0
"""How long one undo may take; what it leaves then is the reaper's."""


class Steps:
    """The steps taken so far."""

    def __init__(self, observer: Observer) -> None:
        """Report each step to `observer`."""
        self._observer = observer
        self._stack = AsyncExitStack()

    def take(self, name: str, context: AbstractContextManager[T]) -> T:
        """Take a step that does not wait; its context's end is its undo."""
        value = context.__enter__()
        self._register(name, nullcontext(), context)
        return value

    async def take_async(self, name: str, context: AbstractAsyncContextManager[T]) -> T:
        """Take a step that may wait; its context's end is its undo."""
        value = await context.__aenter__()
        self._register(name, context, nullcontext())
        return value

    async def promise(self, name: str, context: AbstractAsyncContextManager[T]) -> T:
        """Register the undo of what is about to be made beside other things; that it was made, `done` reports.

        Whatever is made side by side is so undone in the order in which it was promised, last first.
        """
        value = await context.__aenter__()
        self._stack.push_async_callback(self._undoing(name, context, nullcontext()))
        return value

    def done(self, name: str) -> None:
        """Report a step that needs no undo, or whose undo was promised."""
        self._observer.step(name)

    async def undo(self) -> None:
        """Undo everything, last first, whatever fails and although cancelled. Idempotent."""
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()

    def _register(
        self, name: str, waiting: AbstractAsyncContextManager[object], plain: AbstractContextManager[object]
    ) -> None:
        self._stack.push_async_callback(self._undoing(name, waiting, plain))
        self._observer.step(name)

    def _undoing(
        self, name: str, waiting: AbstractAsyncContextManager[object], plain: AbstractContextManager[object]
    ) -> Callable[[], Awaitable[None]]:
        async def undo() -> None:
            try:
                with anyio.fail_after(UNDO_S):
                    await waiting.__aexit__(None, None, None)
                plain.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001 - whatever it is, the steps before it must be undone too
                self._observer.undo_failed(name, f"{type(error).__name__}: {error}")
            else:
                self._observer.step(f"undo {name}")

        return undo


class Nobody:
    """An observer that has nobody to tell."""

    def step(self, name: str) -> None:
        """Tell nobody."""

    def decision(self, record: Record) -> None:
        """Tell nobody."""

    def decisions_end(self, last: int | None) -> None:
        """Tell nobody."""

    def output(self, stream: Stream, data: bytes) -> None:
        """Tell nobody."""

    def undo_failed(self, step: str, message: str) -> None:
        """Tell nobody; the reaper finds what was left."""
