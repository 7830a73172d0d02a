"""Owns what goes in and out of one container: its streams from before its start to its end, and how it ended.

Does not create or remove it. A stream that breaks is not taken up again: what was lost in between would be lost
evidence, so its end counts as the end.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

import anyio

from reconciler.backends.docker_engine import EngineError
from reconciler.backends.docker_stream import Frames
from reconciler.backends.process_io import read_some, write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from anyio.abc import TaskGroup

    from reconciler.backends.base import Stream
    from reconciler.backends.docker_engine import Engine

_AWAY_S = 30.0
"""How long an engine may be away before its containers count as lost."""
_ASK_AGAIN_S = 0.5
_KNOWN_S = 5.0
"""How long after the end of its streams an engine may take to know of a container's end."""
_KEPT_WORDS = 1000


class Streams:
    """The attached streams of one container; `ended` is set when its outputs have."""

    def __init__(self, attached: socket.socket, output: Callable[[Stream, bytes], None]) -> None:
        self._socket = attached
        self._output = output
        self.ended = anyio.Event()

    async def write(self, data: bytes) -> bool:
        """Write to the container's input; False when nobody reads any more."""
        if self._socket.fileno() < 0:
            return False
        try:
            return await write(self._socket.fileno(), data)
        except OSError:
            return False

    def close_input(self) -> None:
        """End the container's input; its outputs go on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def watch(self) -> None:
        """Hand on the outputs until they end; runs beside everything else.

        Not to be cancelled: it ends when the streams do, and whoever attached closes them.
        """
        frames = Frames()
        with anyio.CancelScope(shield=True):
            while not frames.broken and (data := await self._read()):
                for stream, piece in frames.feed(data):
                    self._output(stream, piece)
        self.ended.set()

    async def _read(self) -> bytes:
        try:
            return await read_some(self._socket.fileno())
        except ConnectionError:
            return b""


@contextlib.asynccontextmanager
async def attached(
    engine: Engine, container: str, *, stdin: bool, output: Callable[[Stream, bytes], None], tasks: TaskGroup
) -> AsyncIterator[Streams]:
    """Attach to a container that has not started; at the end of the context the streams are closed."""
    with await engine.attach(container, stdin=stdin) as channel:
        streams = Streams(channel, output)
        tasks.start_soon(streams.watch)
        try:
            yield streams
        finally:
            # Whatever is there to be read has been: a container is at its end before its streams are closed.
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
            with anyio.CancelScope(shield=True):
                await streams.ended.wait()


def _never() -> bool:
    return False


async def until_ended(
    engine: Engine, container: str, *, given_up: Callable[[], bool] = _never
) -> dict[str, Any] | None:
    """Wait until a started container has ended; what the engine says of its end, None when that cannot be known.

    An engine that hangs looks like a container that runs: who waits for an end says itself when to give up.
    """
    away = 0.0
    while away < _AWAY_S and not given_up():
        try:
            while not await engine.wait(container):
                away = 0.0
                if given_up():
                    return None
            found = await engine.container(container)
        except EngineError:
            away += _ASK_AGAIN_S
            await anyio.sleep(_ASK_AGAIN_S)
            continue
        if found is None:
            return None
        state: dict[str, Any] = found["State"]
        if not state["Running"]:
            return state
        away += _ASK_AGAIN_S
        await anyio.sleep(_ASK_AGAIN_S)
    return None


async def how_it_ended(engine: Engine, container: str) -> str:
    """Say, for people, how a container ended that had no reason to: by the engine's word, and by its own last lines.

    Its streams may have ended before the engine knows of its end, or without one.
    """
    try:
        with anyio.move_on_after(_KNOWN_S):
            await until_ended(engine, container)
        found = await engine.container(container)
        if found is None:
            return "its container is gone"
        words = (await engine.last_words(container)).decode("utf-8", "replace")
    except EngineError as error:
        return f"the engine does not say how: {error}"
    state: dict[str, Any] = found["State"]
    said = ["its container runs on" if state["Running"] else f"exit status {state['ExitCode']}"]
    said += ["out of memory"] if state.get("OOMKilled") else []
    said += [f"the engine says {state['Error']!r}"] if state.get("Error") else []
    lines = " | ".join(words.split("\n")).strip(" |")[-_KEPT_WORDS:]
    return "; ".join([*said, f"its last lines: {lines}" if lines else "it wrote nothing"])
