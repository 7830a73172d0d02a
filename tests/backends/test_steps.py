"""Steps are undone last first, all of them, whatever fails on the way."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anyio
import pytest

from reconciler.backends.steps import Steps
from tests.backends.world import Recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@contextlib.contextmanager
def plain(log: list[str], name: str, *, fails: bool = False) -> Iterator[str]:
    """A step that logs its undo, and may fail in it."""
    yield name
    log.append(name)
    if fails:
        raise OSError(f"{name} stays")


@contextlib.asynccontextmanager
async def waiting(log: list[str], name: str) -> AsyncIterator[str]:
    """A step whose undo waits."""
    yield name
    await anyio.sleep(0.01)
    log.append(name)


def test_undo_is_in_reverse_order_and_a_failure_is_reported_and_hinders_nothing() -> None:
    log: list[str] = []
    recorder = Recorder()

    async def main() -> None:
        steps = Steps(recorder)
        assert steps.take("one", plain(log, "one")) == "one"
        assert await steps.take_async("two", waiting(log, "two")) == "two"
        steps.take("three", plain(log, "three", fails=True))
        steps.done("four")
        await steps.undo()
        await steps.undo()

    anyio.run(main)
    assert log == ["three", "two", "one"]
    assert recorder.undone == ["three: OSError: three stays"]
    assert recorder.steps == ["one", "two", "three", "four", "undo two", "undo one"]


def test_undo_happens_although_cancelled() -> None:
    log: list[str] = []

    async def main() -> None:
        steps = Steps(Recorder())
        await steps.take_async("one", waiting(log, "one"))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await steps.undo()

    anyio.run(main)
    assert log == ["one"]


@pytest.mark.parametrize("taken", range(4), ids=lambda taken: f"{taken} steps were taken")
def test_only_what_was_taken_is_undone(taken: int) -> None:
    log: list[str] = []

    async def main() -> None:
        steps = Steps(Recorder())
        for number in range(taken):
            steps.take(str(number), plain(log, str(number)))
        await steps.undo()

    anyio.run(main)
    assert log == [str(number) for number in reversed(range(taken))]
