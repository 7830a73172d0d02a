"""Owns the hints that a watched directory may have changed; what really changed is for a settled snapshot to say."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

import anyio
import watchfiles

from reconciler.directory import Opened, Unsafe, open_directory, owners_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

_STEP_MS = 50
_DEBOUNCE_MS = 200
_RUST_TIMEOUT_MS = 1000
_REBUILD_S = 1.0
"""How long a root that is missing, or a watcher that ended, is left alone before the next try."""


class HintKind(StrEnum):
    """Why it is time to look."""

    START = "start"
    WATCHING = "watching"
    EVENT = "event"
    SCAN = "scan"
    REPLACED = "replaced"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Hint:
    """It is time to take a snapshot. `root` is the watched directory that gave the hint, None for a scan of all."""

    kind: HintKind
    root: Path | None = None


class Watch:
    """An endless iterator of hints. Hints that come while one is waiting are one hint."""

    def __init__(self, roots: Sequence[Path], receive: MemoryObjectReceiveStream[Hint]) -> None:
        self._receive = receive
        self._troubles: dict[Path, str | None] = dict.fromkeys(roots)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Hint:
        return await self._receive.__anext__()

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why events do not come, for `status`; empty while they do. The timed scan goes on either way."""
        return tuple(f"{root}: {trouble}" for root, trouble in self._troubles.items() if trouble is not None)

    def note(self, root: Path, trouble: str | None) -> None:
        """Remember why `root` gives no events, or None when it does."""
        self._troubles[root] = trouble


@asynccontextmanager
async def watching(roots: Sequence[Path], *, owner: str, scan_interval: float) -> AsyncIterator[Watch]:
    """Watch `roots` while the context lasts; the first hint comes at once, and one each `scan_interval` s.

    Each root may be missing, be replaced, or be a symbolic link that flips: its watcher is rebuilt. `owner` is the user
    who, beside root, may own it.
    """
    send, receive = anyio.create_memory_object_stream[Hint](1)
    watch = Watch(roots, receive)
    with send, receive:
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            _offer(send, Hint(HintKind.START))
            tasks.start_soon(_scan, send, scan_interval)
            for root in roots:
                tasks.start_soon(_supervise, root, owner, send, watch, stop)
            try:
                yield watch
            finally:
                # The watcher's threads look at this event; a cancellation alone would wait for their timeout.
                stop.set()
                tasks.cancel_scope.cancel()


def _offer(send: MemoryObjectSendStream[Hint], hint: Hint) -> None:
    try:
        send.send_nowait(hint)
    except (anyio.WouldBlock, anyio.BrokenResourceError):
        return  # one hint is waiting already, and that one leads to the same look


async def _scan(send: MemoryObjectSendStream[Hint], interval: float) -> None:
    while True:
        await anyio.sleep(interval)
        _offer(send, Hint(HintKind.SCAN))


async def _supervise(
    root: Path, owner: str, send: MemoryObjectSendStream[Hint], watch: Watch, stop: anyio.Event
) -> None:
    """Keep a watcher on wherever `root` leads now; whatever ends it is a hint too."""
    known: tuple[int, int] | None = None
    while not stop.is_set():
        place = _look(root, owner)
        if isinstance(place, Unsafe):
            if known is not None:
                _offer(send, Hint(HintKind.REPLACED, root))
            known = None
            watch.note(root, place.message)
            await anyio.sleep(_REBUILD_S)
            continue
        if known is not None and place.identity != known:
            _offer(send, Hint(HintKind.REPLACED, root))
        known = place.identity
        watch.note(root, None)
        trouble = await _until_gone(root, owner, place, send, stop)
        if trouble is not None:
            watch.note(root, f"events were lost ({trouble}); the timed scan goes on")
            _offer(send, Hint(HintKind.LOST, root))
            await anyio.sleep(_REBUILD_S)


async def _until_gone(
    root: Path, owner: str, place: Opened, send: MemoryObjectSendStream[Hint], stop: anyio.Event
) -> str | None:
    """Pass events on as hints until `root` leads elsewhere (None) or the watcher ends (why)."""
    ended = anyio.Event()
    troubles: list[str] = []
    named = frozenset({place.path, *place.links})

    def moved() -> bool:
        now = _look(root, owner)
        return isinstance(now, Unsafe) or now.identity != place.identity or now.path != place.path

    async def events(paths: Sequence[str], keep: Callable[[watchfiles.Change, str], bool], *, deep: bool) -> None:
        settled = False
        try:
            async for changes in watchfiles.awatch(
                *paths,
                watch_filter=keep,
                debounce=_DEBOUNCE_MS,
                step=_STEP_MS,
                rust_timeout=_RUST_TIMEOUT_MS,
                yield_on_timeout=True,
                stop_event=ended,
                force_polling=False,
                recursive=deep,
                ignore_permission_denied=False,
            ):
                if changes or not settled:
                    # The first answer says that the watcher is on. What happened before it was gives no event.
                    _offer(send, Hint(HintKind.EVENT if changes else HintKind.WATCHING, root))
                settled = True
                # Asked at each timeout too: a parent's parent that is renamed gives no event anywhere below it.
                if moved():
                    ended.set()
            if not ended.is_set():
                troubles.append("the watcher ended")
        except* (OSError, RuntimeError, ValueError) as errors:
            troubles.extend(_messages(errors))
        ended.set()

    async def stopped() -> None:
        await stop.wait()
        ended.set()

    try:
        async with anyio.create_task_group() as tasks:
            parents = sorted({os.path.dirname(name) for name in named})  # noqa: PTH120 - strings, as the library wants
            tasks.start_soon(lambda: events([place.path], _tree_change, deep=True))
            tasks.start_soon(lambda: events(parents, lambda _, path: path in named, deep=False))
            tasks.start_soon(stopped)
            await ended.wait()
            tasks.cancel_scope.cancel()
    finally:
        ended.set()
    return troubles[0] if troubles else None


def _messages(errors: BaseExceptionGroup[Exception]) -> list[str]:
    found: list[str] = []
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            found += _messages(error)
        else:
            found.append(ascii(str(error) or type(error).__name__))
    return found


def _look(root: Path, owner: str) -> Opened | Unsafe:
    """Say where `root` leads now. Cheap: a handful of system calls, no reading."""
    owners = owners_of(owner)
    if isinstance(owners, Unsafe):
        return owners
    opened = open_directory(root, owners)
    if isinstance(opened, Opened):
        opened.close()
    return opened


def _tree_change(_: watchfiles.Change, path: str) -> bool:
    """Keep everything but git's object store: the library's own filter drops `.git` and `node_modules` whole."""
    return "/.git/objects/" not in path
